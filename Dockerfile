# Three images, from the root of the checkout:
#
#   docker build --target cpu -t msamp:cpu .       runs the quick start:
#                                  docker run --rm --user "$(id -u):$(id -g)" -v "$PWD/runs:/opt/msamp/runs" msamp:cpu
#   docker build --target gpu -t msamp:gpu .       trains: what examples/kubernetes/pretrain.yaml starts
#   docker build --target peers -t msamp:peers .   compares: with Transformer Engine and flash-attn, which are compiled for an hour
#
# hadolint global ignore=DL3013
# Packages have their versions in the arguments below and in setup.py, where the linter does not look.
#
# All run without root, as user 10001. Packages are those of the lock file, by hash. Not by hash: torch with what it requires (in `gpu` and `peers`
# its own Triton, CUDA's libraries and setuptools, which torch 2.11 wants below 82); in `peers` also setuptools, wheel, ninja, pybind11, Transformer
# Engine, flash-attn, and what these require beyond the lock file. Base images are named by digest: Python's is of docker-library/repo-info
# (2026-08-25), NVIDIA's are those that other public projects pin for these tags.
#
# A torch build decides the CUDA version. Another one: --build-arg GPU_TORCH=torch==2.12.0 --build-arg GPU_INDEX=... and the whole name of a base
# image, --build-arg CUDA=nvidia/cuda:TAG@sha256:DIGEST, for `peers` --build-arg CUDA_DEVEL=... with cuDNN's headers.
ARG PYTHON=python:3.12-slim-bookworm@sha256:0f5b26b9518d002b6173fd61daad821fa340635ebfec5bba471013f9ca114579
ARG CUDA=nvidia/cuda:13.0.1-runtime-ubuntu24.04@sha256:c3fde347d52d578c84fd644bc177bc7ec333feaf11550d990da4084d7612e4c7
ARG CUDA_DEVEL=nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04@sha256:8b2705ea7a8653ad3451b46ab835eced92d77b44e671b9cf3ad4f95fbb2efe5e

FROM ${PYTHON} AS cpu
ARG CPU_TORCH=torch==2.13.0
ARG CPU_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /opt/msamp
# Before the sources: a change of them costs no download. Each name has one source: torch the second, everything else the first.
COPY requirements-dev.txt ./
RUN python3 -m pip install --no-cache-dir --no-deps --require-hashes -r requirements-dev.txt \
 && python3 -m pip install --no-cache-dir "$CPU_TORCH" --index-url "$CPU_INDEX"
COPY LICENSE README.md setup.py pyproject.toml ./
COPY msamp msamp
COPY megatron megatron
COPY tools tools
COPY examples examples
# editable_mode=compat: `megatron` stays a namespace shared with NVIDIA's wheel.
RUN python3 -m pip install --no-cache-dir --no-deps --no-build-isolation --config-settings editable_mode=compat -e . \
 && mkdir -p runs data && chmod 1777 runs data
ENV HOME=/tmp
USER 10001:10001
CMD ["msamp", "quickstart"]

FROM ${CUDA} AS gpu
ARG GPU_TORCH=torch==2.11.0
ARG GPU_INDEX=https://download.pytorch.org/whl/cu130
# gcc and Python's headers are Triton's, which compiles what launches a kernel. Versions are the distribution's.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /opt/msamp
COPY requirements-dev.txt ./
RUN sed '/^triton==/,$d' requirements-dev.txt > packages.txt \
 && python3 -m pip install --no-cache-dir --no-deps --require-hashes -r packages.txt \
 && python3 -m pip install --no-cache-dir "$GPU_TORCH" --index-url "$GPU_INDEX"
COPY LICENSE README.md setup.py pyproject.toml ./
COPY msamp msamp
COPY megatron megatron
COPY tools tools
COPY examples examples
RUN python3 -m pip install --no-cache-dir --no-deps --no-build-isolation --config-settings editable_mode=compat -e . \
 && mkdir -p runs data && chmod 1777 runs data
ENV HOME=/tmp
USER 10001:10001
CMD ["msamp", "pretrain", "--help"]

FROM ${CUDA_DEVEL} AS peers
ARG GPU_TORCH=torch==2.11.0
ARG GPU_INDEX=https://download.pytorch.org/whl/cu130
ARG GPU_ARCHITECTURES=9.0
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends git python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /opt/msamp
COPY requirements-dev.txt ./
RUN sed '/^triton==/,$d' requirements-dev.txt > packages.txt \
 && python3 -m pip install --no-cache-dir --no-deps --require-hashes -r packages.txt \
 && python3 -m pip install --no-cache-dir "$GPU_TORCH" --index-url "$GPU_INDEX"
COPY LICENSE README.md setup.py pyproject.toml ./
COPY msamp msamp
COPY megatron megatron
COPY tools tools
COPY examples examples
# Both peers compile against the torch that is installed, hence without a build environment of their own.
RUN python3 -m pip install --no-cache-dir setuptools==80.9.0 wheel==0.45.1 ninja==1.13.0 pybind11==3.0.1 \
 && NVTE_FRAMEWORK=pytorch TORCH_CUDA_ARCH_LIST="$GPU_ARCHITECTURES" MAX_JOBS=4 \
    python3 -m pip install --no-cache-dir --no-build-isolation --config-settings editable_mode=compat -e '.[gpu,peers]' \
 && mkdir -p runs data && chmod 1777 runs data
ENV HOME=/tmp
USER 10001:10001
CMD ["msamp", "pretrain", "--help"]
