# Prefill and decode nodes, with the extras images and s3. Build in the project's root; for NVIDIA GPUs with
#   --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 --build-arg VARIANT=cuda
#
#   docker build -f deploy/docker/node.Dockerfile -t baton-node:0.1.0 .
#   buildah build -f deploy/docker/node.Dockerfile -t baton-node:0.1.0 .

ARG PYTHON_IMAGE=python:3.12-slim-bookworm
# What the last stage is made of: cpu or cuda.
ARG VARIANT=cpu
FROM ${PYTHON_IMAGE} AS build

ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --quiet --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY deploy/docker/node.lock deploy/docker/build.lock deploy/docker/
RUN python -m venv /opt/tools \
    && /opt/tools/bin/pip install --quiet --require-hashes --no-deps -r deploy/docker/build.lock \
    && python -m venv /opt/baton \
    && /opt/baton/bin/pip install --quiet --require-hashes --no-deps -r deploy/docker/node.lock \
    && /opt/baton/bin/pip install --quiet --index-url "${TORCH_INDEX}" "torch==${TORCH}"
COPY . .
# The kernels in C are built here, for several instruction sets; a node loads the best for its CPU.
RUN /opt/tools/bin/python -m hatchling build --target wheel --directory /tmp/wheel \
    && /opt/baton/bin/pip install --quiet --no-deps --no-index /tmp/wheel/*.whl \
    && /opt/baton/bin/pip check \
    && /opt/baton/bin/python -m baton_kernels.native.build_ahead /opt/baton/native \
    && /opt/tools/bin/cyclonedx-py environment --output-reproducible --output-file /opt/baton/sbom.cdx.json /opt/baton/bin/python \
    && /opt/baton/bin/python -m pip uninstall --quiet --yes pip \
    && /opt/baton/bin/baton version

FROM ${PYTHON_IMAGE} AS cpu

# Triton compiles a small host program in C for each kernel that it launches: on a GPU there is no
# way around a compiler. A node on a CPU has none.
FROM ${PYTHON_IMAGE} AS cuda
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --quiet --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# hadolint ignore=DL3006
FROM ${VARIANT}

LABEL org.opencontainers.image.title="Baton: prefill and decode nodes" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 baton && useradd --uid 10001 --gid baton --create-home baton
COPY --from=build /opt/baton /opt/baton
COPY --chmod=0755 deploy/docker/healthcheck.py /usr/local/bin/baton-healthcheck
ENV PATH=/opt/baton/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    BATON_NATIVE_LIBRARIES=/opt/baton/native \
    BATON_HEALTH_URL=http://127.0.0.1:9464/health
USER 10001:10001
WORKDIR /home/baton
EXPOSE 9464 7100
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 CMD ["baton-healthcheck"]
ENTRYPOINT ["baton"]
CMD ["--help"]
