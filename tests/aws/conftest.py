"""Makes the templates of all stages, once."""

import os
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec

import pytest

from infra.hosts.ecs import EcsHosts
from tests.support.aws_templates import Templates
from tests.support.ecs_hosts import make_ecs_hosts, simulate_aws

#: As in `infra/aws/app.py`.
os.environ.setdefault("JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION", "18,20,22")
#: Without CDK there is nothing to test: `make aws` installs it.
collect_ignore_glob = [] if find_spec("aws_cdk") else ["test_*.py"]


@pytest.fixture(scope="session")
def synthesised(tmp_path_factory: pytest.TempPathFactory) -> Templates:
    from infra.aws.app import main
    from infra.aws.stages import STAGES, AwsStage

    # Production's other choice of a Valkey.
    elasticache = AwsStage(
        name="elasticache", temporal_cloud=True, cidr="10.82.0.0/16", own_valkey=False
    )
    folder = tmp_path_factory.mktemp("cdk.out")
    assert main([str(folder)], (*STAGES, elasticache)) == 0, "cdk-nag or CDK itself found something"
    return Templates(folder)


@pytest.fixture(params=["staging", "production", "elasticache"])
def templates(request: pytest.FixtureRequest, synthesised: Templates) -> Templates:
    return synthesised.of(request.param)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with simulate_aws(monkeypatch):
        yield


@pytest.fixture
async def hosts(aws: None) -> AsyncIterator[EcsHosts]:
    async with make_ecs_hosts() as hosts:
        yield hosts
