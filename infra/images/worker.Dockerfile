# A user's worker: the core dependencies, the broker SDK and `worker_runtime`. No other room is in here.
#   docker build -f infra/images/worker.Dockerfile -t berth-worker:0.1.0 .
# Where no image can be pulled and nothing downloaded: `python -m infra.lab.worker_image` (a base image of this
# machine's own Debian, wheels beside the source).
#
# Its launch document comes on standard input. By hand, as the launcher does it:
#   docker run -i --rm --init --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges \
#     berth-worker:0.1.0 < config.json
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS build
# Extras of pyproject.toml: the SDKs of the brokers that these workers are for.
ARG EXTRAS=shioaji
# For a build without a network: --no-index --find-links=/src, with wheels in infra/images/wheels.
ARG PIP_OPTIONS=
# `pinned`: the build fails when the index no longer has the SDK that the lock pins. `fallback`: the newest that
# pyproject.toml allows takes its place, or none, with a loud line (infra/images/install_shioaji.py).
ARG SHIOAJI=fallback
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/berth
WORKDIR /src
# The wheels need not be there: a pattern that finds nothing is no error beside files that exist.
COPY pyproject.toml requirements.lock requirements-shioaji.lock infra/images/requirements.py \
     infra/images/install_shioaji.py infra/images/wheel[s] ./
RUN /opt/berth/bin/python requirements.py --without-shioaji ${EXTRAS} > wanted.txt \
    && /opt/berth/bin/pip install ${PIP_OPTIONS} --require-hashes -r wanted.txt \
    && case " ${EXTRAS} " in *" shioaji "*) \
         /opt/berth/bin/python install_shioaji.py ${SHIOAJI} ${PIP_OPTIONS};; esac \
    && /opt/berth/bin/pip uninstall --yes pip setuptools
COPY worker_runtime /opt/berth/room/worker_runtime
# The modes are those of the clone, which a umask of 077 made unreadable for others.
RUN /opt/berth/bin/python -m compileall -q /opt/berth && chmod -R a+rX /opt/berth

FROM ${BASE_IMAGE}
# What it was built on, by digest if the build was given one: `docker inspect` tells.
ARG BASE_IMAGE
LABEL org.opencontainers.image.base.name=${BASE_IMAGE}
RUN groupadd --gid 10002 worker \
    && useradd --uid 10002 --gid worker --no-create-home --home-dir /tmp --shell /usr/sbin/nologin worker
COPY --from=build /opt/berth /opt/berth
# The SDK writes a log, a home folder and a contract cache; with a read-only root only /tmp takes them.
ENV PATH=/opt/berth/bin:$PATH PYTHONPATH=/opt/berth/room PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    SJ_LOG_PATH=/tmp/shioaji.log SJ_HOME_PATH=/tmp/shioaji SJ_CONTRACTS_PATH=/tmp/shioaji
WORKDIR /tmp
USER 10002:10002
STOPSIGNAL SIGTERM
# No init process in the image: the launcher asks Docker for one (`--init`, which is tini), and ECS has its own.
ENTRYPOINT ["python", "-P", "-m", "worker_runtime"]
