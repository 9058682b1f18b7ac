# An image of Partita for clusters, from Debian's packages and PyPI: `docker build -t registry.example/partita .`
# torch comes with CUDA on x86 Linux; for CPUs alone: --build-arg INDEX=https://download.pytorch.org/whl/cpu
ARG BASE=debian:bookworm-slim
FROM ${BASE}

ARG INDEX=https://pypi.org/simple
# Which torch: `torch==2.11.*` for an older driver.
ARG TORCH=torch

# The compiler makes our kernels for CPUs, and with Python's headers those of `compile = true`.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3-dev python3-venv g++ \
 && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/partita
ENV PATH=/opt/partita/bin:$PATH

RUN pip install --no-cache-dir --upgrade pip "setuptools>=77" \
 && pip install --no-cache-dir --index-url "$INDEX" "$TORCH"
COPY . /src
RUN pip install --no-cache-dir "/src[run,data,remote]" && rm -rf /src

WORKDIR /work
CMD ["partita", "--help"]
