"""The templates of all stages, synthesised once."""

import os
from importlib.util import find_spec

import pytest

from tests.support.aws_templates import Templates
from tests.unit.hosts.test_ecs import aws, hosts

#: The last two are fixtures: a cluster with a capacity provider, on moto.
__all__ = ["aws", "hosts", "synthesised", "templates"]

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
