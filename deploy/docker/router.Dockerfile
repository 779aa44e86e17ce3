# The router, the baton commands and the load test: no torch. Build in the project's root:
#
#   docker build -f deploy/docker/router.Dockerfile -t baton-router:0.1.0 .
#   buildah build -f deploy/docker/router.Dockerfile -t baton-router:0.1.0 .

ARG PYTHON_IMAGE=python:3.12-slim-bookworm
FROM ${PYTHON_IMAGE} AS build

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /src
COPY deploy/docker/router.lock deploy/docker/build.lock deploy/docker/
RUN python -m venv /opt/tools \
    && /opt/tools/bin/pip install --quiet --require-hashes --no-deps -r deploy/docker/build.lock \
    && python -m venv /opt/baton \
    && /opt/baton/bin/pip install --quiet --require-hashes --no-deps -r deploy/docker/router.lock
COPY . .
# Built by locked tools, of what is in the folder alone; then what no program needs is left out.
RUN /opt/tools/bin/python -m hatchling build --target wheel --directory /tmp/wheel \
    && /opt/baton/bin/pip install --quiet --no-deps --no-index /tmp/wheel/*.whl \
    && /opt/baton/bin/pip check \
    && /opt/tools/bin/cyclonedx-py environment --output-reproducible --output-file /opt/baton/sbom.cdx.json /opt/baton/bin/python \
    && /opt/baton/bin/python -m pip uninstall --quiet --yes pip \
    && /opt/baton/bin/baton version

FROM ${PYTHON_IMAGE}

LABEL org.opencontainers.image.title="Baton: router, commands, load test" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 baton && useradd --uid 10001 --gid baton --create-home baton
COPY --from=build /opt/baton /opt/baton
COPY --chmod=0755 deploy/docker/healthcheck.py /usr/local/bin/baton-healthcheck
ENV PATH=/opt/baton/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    BATON_HEALTH_URL=http://127.0.0.1:8000/health
USER 10001:10001
WORKDIR /home/baton
EXPOSE 50051 50052 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["baton-healthcheck"]
ENTRYPOINT ["baton"]
CMD ["--help"]
