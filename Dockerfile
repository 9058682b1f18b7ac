# An image of Partita for clusters: `docker build -t registry.example/partita .`
# torch comes from PyPI, with CUDA on x86 Linux; for CPUs alone: --build-arg INDEX=https://download.pytorch.org/whl/cpu
FROM python:3.12-slim

ARG INDEX=https://pypi.org/simple

# What `compile = true` needs on CPUs.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*

RUN pip install --no-cache-dir --index-url "$INDEX" torch
COPY . /src
RUN pip install --no-cache-dir "/src[run,data,remote]" && rm -rf /src

WORKDIR /work
CMD ["partita", "--help"]
