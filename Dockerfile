# syntax=docker/dockerfile:1
#
#     docker build --tag megatron-lowbit .                      training on NVIDIA GPUs
#     docker build --target cpu --tag megatron-lowbit:cpu .     the test suite, on a CPU

FROM python:3.12.12-slim-bookworm AS cpu

LABEL org.opencontainers.image.title="megatron-lowbit" \
      org.opencontainers.image.description="Low-precision LLM pretraining on Megatron: CPU, tests" \
      org.opencontainers.image.version="0.3.0" \
      org.opencontainers.image.licenses="Apache-2.0"

# torch.compile builds the quantizers' loops with g++. No version: Debian's mirrors keep only the
# newest of this release.
# hadolint ignore=DL3008
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,target=/var/lib/apt,sharing=locked \
    rm --force /etc/apt/apt.conf.d/docker-clean \
    && apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && useradd --create-home --uid 10001 lowbit \
    && install --directory --owner 10001 /workspace

WORKDIR /workspace

# First what the package needs, by way of a package without code: this layer stays when code
# changes. torch alone, and +cpu: PyPI's has CUDA, which pip would take where the CPU index is not
# reached.
COPY constraints.txt pyproject.toml setup.py README.md LICENSE NOTICE ./
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps "$(grep '^torch==' constraints.txt)+cpu" \
        --extra-index-url https://download.pytorch.org/whl/cpu \
    && pip install --constraint constraints.txt '.[test]' \
    && pip uninstall --yes megatron-lowbit

COPY --chown=10001 . .
RUN pip install --no-cache-dir --no-deps --editable .

USER 10001
CMD ["pytest", "-q", "-n", "2", "--dist", "loadfile"]


# Python 3.12, CUDA 13.2, torch 2.11.0a0, Triton 3.6.0. Newer ones have a newer Transformer Engine
# than this one's 2.13, but none 2.20, and a torch and Triton that this project was not measured with.
FROM nvcr.io/nvidia/pytorch:26.03-py3 AS gpu

LABEL org.opencontainers.image.title="megatron-lowbit" \
      org.opencontainers.image.description="Low-precision LLM pretraining on Megatron: NVIDIA GPUs" \
      org.opencontainers.image.version="0.3.0" \
      org.opencontainers.image.licenses="Apache-2.0"

# A virtual environment on top of the image's Python: what it holds goes before the image's
# packages and replaces none of them. An empty PIP_CONSTRAINT: NVIDIA's list pins the image's own
# versions, Transformer Engine's among them.
ENV PATH=/opt/lowbit/bin:$PATH \
    PIP_CONSTRAINT=""
WORKDIR /workspace

# The project's pins, but the image's torch: pip stops where anything would bring in another.
# Not the project itself, which wants torch>=2.11: as a version number 2.11.0a0 is less. Beside it
# what Transformer Engine and mamba-ssm import.
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
COPY constraints.txt pyproject.toml ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv --system-site-packages --without-pip /opt/lowbit \
    && python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
        print(*(d for d in project['dependencies'] if not d.startswith('torch')), sep='\n')" \
        > /tmp/requirements.txt \
    && grep --invert-match --extended-regexp '^(torch|triton)==' constraints.txt > /tmp/pins.txt \
    && python -m pip list --format=freeze | grep '^torch==' >> /tmp/pins.txt \
    && python -m pip install --constraint /tmp/pins.txt --requirement /tmp/requirements.txt \
        ninja wheel nvdlfw-inspect onnxscript transformers \
    && rm /tmp/requirements.txt /tmp/pins.txt

# Compiled against the image's torch: a wheel for a torch of nearly the same version may load and
# fail later. MAX_JOBS: how many files at once, each of which may take gigabytes of memory. Without
# what they require: that is here, but for a newer cudnn-frontend, which only the fused MLP of
# Transformer Engine's experts imports. liger-kernel has nothing to compile.
ARG MAX_JOBS=4
RUN --mount=type=cache,target=/root/.cache/pip \
    export MAX_JOBS NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE \
        MAMBA_FORCE_BUILD=TRUE CAUSAL_CONV1D_FORCE_BUILD=TRUE \
    && python -m pip install --no-deps \
        transformer_engine==2.20.2 transformer_engine_cu13==2.20.2 liger-kernel==0.8.5 \
    && python -m pip install --no-deps --no-build-isolation \
        transformer_engine_torch==2.20.2 causal-conv1d==1.7.0 mamba-ssm==2.3.1

COPY . .
RUN python -m pip install --no-cache-dir --no-deps . \
    && useradd --create-home --uid 10001 lowbit

USER 10001
CMD ["lowbit-pretrain", "--help"]
