# syntax=docker/dockerfile:1
# One image for the API, the orchestrator, the node, job runners and the paper exchange; the command says which.
#   docker build -f infra/images/server.Dockerfile -t berth-server .
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/berth
WORKDIR /src
# Dependencies first: this layer stays as long as the lock does. The lock is a constraint, not a list: only
# what the `server` and `shioaji` extras ask for is installed. (A node hosts workers, so it needs the SDK.)
COPY pyproject.toml requirements.lock ./
COPY infra/images/requirements.py ./
RUN python requirements.py server shioaji > wanted.txt \
    && /opt/berth/bin/pip install -c requirements.lock -r wanted.txt "setuptools>=80"
COPY README.md LICENSE ./
COPY worker_runtime worker_runtime
COPY workflows workflows
COPY activities activities
COPY api api
COPY infra infra
RUN /opt/berth/bin/pip install --no-deps --no-build-isolation . \
    && /opt/berth/bin/python -m compileall -q /opt/berth

FROM ${BASE_IMAGE}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 berth \
    && useradd --uid 10001 --gid berth --no-create-home --home-dir /data --shell /usr/sbin/nologin berth \
    # A new named volume takes over the owner and the mode of the folder it is mounted on.
    && install --directory --owner=berth --group=berth --mode=0700 \
       /data /keys/private /keys/public /keys/jobs /run/berth
COPY --from=build /opt/berth /opt/berth
ENV PATH=/opt/berth/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    BERTH_DATA_DIR=/data BERTH_NODE_SOCKET=/run/berth/node.sock
WORKDIR /data
USER 10001:10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/bin/tini", "--"]
CMD ["berth", "--help"]
