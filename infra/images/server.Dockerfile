# One image for the API, the orchestrator, the launcher, job runners and the paper exchange; the command says
# which. A node hosts workers itself, so its image has the brokers' SDKs too (EXTRAS).
#   docker build -f infra/images/server.Dockerfile -t berth-server:0.1.0 .
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS build
# Extras of pyproject.toml beside `server`: `shioaji` for a node.
ARG EXTRAS=
# For a build without a network: --no-index --find-links=/src, with wheels in infra/images/wheels.
ARG PIP_OPTIONS=
# `pinned`: the build fails when the index no longer has the SDK that the lock pins. `fallback`: the newest that
# pyproject.toml allows takes its place, or none, with a loud line (infra/images/install_shioaji.py).
ARG SHIOAJI=fallback
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/berth
WORKDIR /src
# Dependencies first: this layer stays as long as the lock does. Of the lock only what the extras need, each by
# its hash. The wheels need not be there: a pattern that finds nothing is no error beside files that exist.
COPY pyproject.toml requirements.lock requirements-shioaji.lock infra/images/requirements.py \
     infra/images/install_shioaji.py infra/images/wheel[s] ./
RUN /opt/berth/bin/python requirements.py --without-shioaji server ${EXTRAS} setuptools > wanted.txt \
    && /opt/berth/bin/pip install ${PIP_OPTIONS} --require-hashes -r wanted.txt \
    && case " ${EXTRAS} " in *" shioaji "*) \
         /opt/berth/bin/python install_shioaji.py ${SHIOAJI} ${PIP_OPTIONS};; esac
COPY README.md LICENSE ./
COPY worker_runtime worker_runtime
COPY workflows workflows
COPY activities activities
COPY api api
COPY infra infra
RUN /opt/berth/bin/pip install --no-deps --no-build-isolation . ./infra/berth_jobs \
    && /opt/berth/bin/pip uninstall --quiet --yes pip setuptools \
    # Of AWS's services only those that we call or log in with: 27 of the 31 MB are the others' descriptions.
    && cd /opt/berth/lib/python3*/site-packages/botocore/data \
    && find . -mindepth 1 -maxdepth 1 -type d | grep -vxE "\./(autoscaling|cloudwatch|ecs|kms|secretsmanager|sqs|sso|sso-oidc|sts)" \
       | xargs rm -r \
    # Temporal's Rust sources: 12 MB.
    && rm -r ../../temporalio/bridge/sdk-core \
    # What only type checkers and compilers read: 3 MB.
    && find /opt/berth/lib -type f \( -name "*.pyi" -o -name "*.pyx" -o -name "*.pxd" -o -name "*.pxi" \) -delete \
    && /opt/berth/bin/python -m compileall -q /opt/berth

FROM ${BASE_IMAGE}
# What it was built on, by digest if the build was given one: `docker inspect` tells.
ARG BASE_IMAGE
LABEL org.opencontainers.image.base.name=${BASE_IMAGE}
RUN groupadd --gid 10001 berth \
    && useradd --uid 10001 --gid berth --no-create-home --home-dir /data --shell /usr/sbin/nologin berth \
    # A new named volume takes over the owner and the mode of the folder it is mounted on.
    && install --directory --owner=berth --group=berth --mode=0700 \
       /data /keys/private /keys/public /keys/messages /keys/api /keys/codec /keys/temporal /run/berth \
       /keys/fleet /keys/webhook /keys/email /keys/messaging /keys/push /keys/jobs \
       /keys/application /keys/application/secrets
COPY --from=build /opt/berth /opt/berth
ENV PATH=/opt/berth/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    BERTH_DATA_DIR=/data BERTH_NODE_SOCKET=/run/berth/node.sock
WORKDIR /data
USER 10001:10001
STOPSIGNAL SIGTERM
# No init process in the image: compose asks Docker for one (`init: true`, which is tini), and ECS has its own.
CMD ["berth", "--help"]
