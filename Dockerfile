# syntax=docker/dockerfile:1
# fusible with its kernels for Hopper GPUs, and PyTorch, for any machine with Docker and NVIDIA's driver:
#   docker build -t fusible .
#   docker run --rm --gpus all fusible            what was installed, and what runs on this GPU
#   docker run --rm --gpus all fusible demo       any other command of fusible
ARG UBUNTU=24.04
ARG CUDA=13.0.1

# The wheel: compiled without a GPU, for the Python of the image below.
FROM nvidia/cuda:${CUDA}-devel-ubuntu${UBUNTU} AS wheel
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /venv
COPY . /fusible
RUN FUSIBLE_BUILD_CUDA=1 /venv/bin/pip wheel --no-cache-dir --no-deps -w /wheels /fusible

# PyTorch brings the libraries of CUDA; compilers stay behind.
FROM ubuntu:${UBUNTU}
ARG TORCH=2.11.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /venv \
    && /venv/bin/pip install --no-cache-dir torch==${TORCH} --index-url ${TORCH_INDEX}
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    /venv/bin/pip install --no-cache-dir /wheels/*.whl
ENV PATH=/venv/bin:${PATH} \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN useradd --create-home fusible
USER fusible
WORKDIR /home/fusible
ENTRYPOINT ["fusible"]
CMD ["info"]
