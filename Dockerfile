# Two images. The services run without torch, in a tenth of the room:
#   docker build --target services .    lighthouse, torchft-manager
#   docker build .                      the same, torchft-run and trainers
FROM python:3.11-slim AS base
WORKDIR /app
ENV PYTHONUNBUFFERED=1

FROM base AS services
COPY constraints.txt requirements-services.txt requirements-dashboard.txt ./
RUN pip install --no-cache-dir -c constraints.txt -r requirements-services.txt \
    -r requirements-dashboard.txt
COPY pyproject.toml README.md LICENSE ./
COPY torchft_svc torchft_svc
# The package asks for torch, which only trainers import.
RUN pip install --no-cache-dir --no-deps .
RUN useradd --create-home service
USER service

FROM base AS trainer
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
