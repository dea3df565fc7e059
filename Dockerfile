# One image for all roles: lighthouse, torchft-manager and a trainer.
FROM python:3.11-slim

WORKDIR /app
ENV PYTHONUNBUFFERED=1

# The CPU build of torch is a tenth of the default one's size; with GPUs, leave the index out.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt --index-url "$TORCH_INDEX" torch

COPY pyproject.toml README.md LICENSE ./
COPY torchft_svc torchft_svc
RUN pip install --no-cache-dir -c constraints.txt .
COPY examples examples

RUN useradd --create-home trainer && mkdir /checkpoints && chown trainer /checkpoints
USER trainer
