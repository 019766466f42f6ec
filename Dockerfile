# One image for each service, a stage each: scheduler, detokenizer, frontend, gpu_worker.
#
#     docker build --target scheduler -t quire-scheduler .
#
# Only gpu_worker has torch. BASE is any image with Python 3.11 or later and its venv module. pip's own settings can be
# given as build arguments, for example PIP_EXTRA_INDEX_URL with an index of torch built for CPUs alone. QUIRE_EXTRAS
# names extras of pyproject.toml that every image has too, for example tracing.
ARG BASE=python:3.12-slim

FROM ${BASE} AS base
ENV PATH=/opt/quire/bin:$PATH PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1
# Volumes are mounted on the last three; a new volume takes its owner and mode from here.
RUN useradd --uid 10001 --no-create-home --home-dir /cache quire \
    && mkdir -p /keys /cache /claims && chown quire /keys /cache /claims && chmod 700 /keys

FROM base AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG QUIRE_EXTRAS
RUN python3 -m venv /opt/quire
COPY deploy/requirements.py pyproject.toml /build/

FROM build AS wheel
# The wheel carries the native kernels of CPU workers for every instruction set; without a compiler it would be made
# without them.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-deps --wheel-dir /wheel /source

FROM build AS build-scheduler
RUN --mount=type=cache,target=/root/.cache/pip \
    python /build/requirements.py scheduler "$QUIRE_EXTRAS" > /build/needs.txt && pip install -r /build/needs.txt
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps /wheel/*.whl && pip uninstall -y pip

FROM build AS build-detokenizer
RUN --mount=type=cache,target=/root/.cache/pip \
    python /build/requirements.py detokenizer "$QUIRE_EXTRAS" > /build/needs.txt && pip install -r /build/needs.txt
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps /wheel/*.whl && pip uninstall -y pip

FROM build AS build-frontend
RUN --mount=type=cache,target=/root/.cache/pip \
    python /build/requirements.py frontend "$QUIRE_EXTRAS" > /build/needs.txt && pip install -r /build/needs.txt
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps /wheel/*.whl && pip uninstall -y pip

FROM build AS build-gpu_worker
RUN --mount=type=cache,target=/root/.cache/pip \
    python /build/requirements.py gpu_worker "$QUIRE_EXTRAS" > /build/needs.txt && pip install -r /build/needs.txt
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps /wheel/*.whl && pip uninstall -y pip

FROM base AS service
COPY deploy/healthcheck.py deploy/claim_gpu.py /opt/
ENV HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton XDG_CACHE_HOME=/cache
WORKDIR /

FROM service AS scheduler
COPY --from=build-scheduler /opt/quire /opt/quire
USER quire
EXPOSE 5600 5601
ENTRYPOINT ["python", "-m", "quire.scheduler"]

FROM service AS detokenizer
COPY --from=build-detokenizer /opt/quire /opt/quire
USER quire
EXPOSE 5610
ENTRYPOINT ["python", "-m", "quire.detokenizer"]

FROM service AS frontend
COPY --from=build-frontend /opt/quire /opt/quire
USER quire
EXPOSE 8000
ENTRYPOINT ["python", "-m", "quire.frontend"]

FROM service AS gpu_worker
# Triton compiles a small launcher for each kernel, with the C compiler of the machine it runs on.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build-gpu_worker /opt/quire /opt/quire
USER quire
ENTRYPOINT ["python", "-m", "quire.gpu_worker"]
