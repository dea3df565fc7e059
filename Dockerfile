# One image for all roles: lighthouse, torchft-manager and a trainer.
FROM python:3.11-slim

WORKDIR /app
ENV PYTHONUNBUFFERED=1

# The CPU build of torch is a tenth of the default one's size: name its index with
# --build-arg PIP_FLAGS="--index-url ...", as torch's installation page says.
ARG PIP_FLAGS=""
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt $PIP_FLAGS torch

COPY pyproject.toml README.md LICENSE ./
COPY torchft_svc torchft_svc
RUN pip install --no-cache-dir -c constraints.txt .
COPY examples examples

RUN useradd --create-home trainer && mkdir /checkpoints && chown trainer /checkpoints
USER trainer
