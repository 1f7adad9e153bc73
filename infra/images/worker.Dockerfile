# syntax=docker/dockerfile:1
# A user's worker: the core dependencies, the broker SDK and `worker_runtime`. No other room is in here.
# Its launch document comes on standard input: `docker run -i berth-worker < config.json`.
#   docker build -f infra/images/worker.Dockerfile -t berth-worker .
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/berth
WORKDIR /src
COPY pyproject.toml requirements.lock ./
COPY infra/images/requirements.py ./
RUN python requirements.py shioaji > wanted.txt \
    && /opt/berth/bin/pip install -c requirements.lock -r wanted.txt \
    && /opt/berth/bin/pip uninstall --yes pip setuptools
COPY worker_runtime /opt/berth/room/worker_runtime
RUN /opt/berth/bin/python -m compileall -q /opt/berth

FROM ${BASE_IMAGE}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10002 worker \
    && useradd --uid 10002 --gid worker --no-create-home --home-dir /tmp --shell /usr/sbin/nologin worker
COPY --from=build /opt/berth /opt/berth
# The SDK writes a log, a home folder and a contract cache; with a read-only root only /tmp takes them.
ENV PATH=/opt/berth/bin:$PATH PYTHONPATH=/opt/berth/room PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    SJ_LOG_PATH=/tmp/shioaji.log SJ_HOME_PATH=/tmp/shioaji SJ_CONTRACTS_PATH=/tmp/shioaji
WORKDIR /tmp
USER 10002:10002
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/bin/tini", "--"]
CMD ["python", "-m", "worker_runtime"]
