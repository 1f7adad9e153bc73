"""Tasks get the settings that we have, and each one that they do not get has a reason."""

import json

import pytest

from infra.aws.data import FOLDERS
from infra.settings import EcsSettings, Settings
from tests.support.aws_templates import Resource, Templates, text_of

pytestmark = pytest.mark.timeout(600)

#: Settings that no task gets, each with the reason.
LEFT_OUT = {
    "a fleet of an application's own job types, which the stages do not make": {
        "jobs_application",
        "jobs_modules",
        "jobs_path",
        "jobs_secrets_dir",
    },
    "its default holds on AWS, too": {
        "live_accounts",
        "api_keep_alive",
        "forwarded_header",
        "entity_period",
        "api_key_cache",
        "limit_address",
        "limit_key",
        "limit_user",
        "order_deadline",
        "order_wait",
        "jobs_lease",
        "jobs_recycle",
        "jobs_waiting",
        "jobs_timeout",
        "jobs_attempts",
        "jobs_retry_delay",
        "jobs_result_ttl",
        "jobs_runner_ttl",
        "jobs_timeout_margin",
        "unknown_blocks",
        "webhook_rate",
        "webhook_wait",
        "database_pool",
        "database_pool_wait",
        "task_queues",
        "orchestrator_name",
        "deployment_name",
        "build_id",
        "promote",
        "stop_grace",
        "differences_block",
        "sweep_period",
        "absent_after",
        "verify_patience",
        "trading_day_end",
        "launch_rate",
        "launch_burst",
        "pool",
        "instruments_pool",
        "instruments_lead",
        "worker_version",
        "pool_minimum",
        "pool_maximum",
        "pool_buffer",
        "pool_demand_minutes",
        "pool_limit",
        "pool_shrink_after",
        "pool_windows",
        "mark_ttl",
        "mark_period",
        "pulse_timeout",
        "health_period",
        "maintenance_period",
        "jobs_wait",
        "jobs_tiers",
        "alert_days",
        "order_days",
        "audit_days",
        "worker_history_days",
        "dead_letter_days",
        "budget_share",
        "egress_persons",
        "idle_timeout",
        "connect_attempts",
        "connect_timeout",
        "claim_timeout",
        "launch_timeout",
        "temporal_ca_file",
        "temporal_server_name",
        "temporal_cert_file",
        "temporal_cert_key_file",
        "ecs_placement",
        "ecs_listing_period",
        "ecs_hosts_rate",
        "messaging_url",
        "push_url",
    },
    "an operator's choice, set in `stages.py` when it is made": {
        "alert_mails",
        "alert_webhooks",
        "alert_window",
        "alert_limit",
        "mail_host",
        "mail_port",
        "mail_security",
        "mail_sender",
        "mail_username",
        "mail_password_file",
        "messaging_account",
        "messaging_token_file",
        "messaging_sms_sender",
        "messaging_whatsapp_sender",
        "push_key_file",
        "statements",
        "statements_at",
        "statements_zone",
        "statements_rate",
        "report_at",
        "report_to",
        "check_max_quantity",
        "check_max_notional",
        "check_price_band",
        "check_daily_orders",
        "check_duplicate_window",
        "check_symbols",
        "check_market_open",
        "check_prices",
        "symbols_file",
        "calendar_file",
        "broker_options",
        "temporal_ui_url",
        "traces_url",
        "metrics_address",
        "webhook_allow_private",
    },
    "the balancer serves the API at the root of its host": {"api_root_path"},
    "tasks on Fargate only": {"ecs_subnets", "ecs_security_groups"},
    "of a master key in files": {"master_public_file", "master_key_retired"},
    "other launchers, and the node": {
        "node_socket",
        "node_uids",
        "docker_socket",
        "docker_image",
        "docker_network",
        "docker_fleet",
    },
    "AWS has no pooler": {"database_direct_url"},
    "the command line": {"api_url", "api_key_file", "backup_recipients", "backup_spool_bytes"},
    "a new system's histories begin encrypted": {"temporal_codec_reads_clear"},
}
#: The paper exchange, and groups whose defaults hold on AWS, too: bells, tiers, what is kept how
#: long.
PREFIXES_LEFT_OUT = (
    "exchange_",
    "morning_",
    "evening_",
    "jobs_runners",
    "jobs_wait",
    "jobs_tiers",
    "alert_days",
    "order_days",
    "audit_days",
)


def known() -> set[str]:
    return set(Settings.model_fields) | {f"ecs_{name}" for name in EcsSettings.model_fields}


def servers(templates: Templates) -> list[Resource]:
    return [
        container
        for task in templates.resources("AWS::ECS::TaskDefinition").values()
        for container in task["ContainerDefinitions"]
        if any(
            variable["Name"].startswith("BERTH_") for variable in container.get("Environment", [])
        )
    ]


def names(container: Resource) -> set[str]:
    given = [*container.get("Environment", []), *container.get("Secrets", [])]
    return {entry["Name"].removeprefix("BERTH_").lower() for entry in given}


def test_every_variable_and_secret_of_a_task_is_a_setting(templates: Templates) -> None:
    assert len(servers(templates)) >= 12
    for container in servers(templates):
        assert names(container) - known() == set(), container["Name"]


def test_every_setting_is_given_or_left_out_for_a_reason(templates: Templates) -> None:
    given = set().union(*(names(container) for container in servers(templates)))
    left_out = set().union(*LEFT_OUT.values())
    assert left_out - known() == set(), "no longer settings"
    assert given & left_out == set(), "left out, and given"
    missing = {
        name for name in known() - given - left_out if not name.startswith(PREFIXES_LEFT_OUT)
    }
    assert missing == set()


def test_what_is_given_can_be_read(templates: Templates, monkeypatch: pytest.MonkeyPatch) -> None:
    for container in servers(templates):
        with monkeypatch.context() as environment:
            for variable in container["Environment"]:
                environment.setenv(variable["Name"], text_of(variable["Value"]))
            for secret in container.get("Secrets", []):  # URLs have to be some
                field = Settings.model_fields.get(secret["Name"].removeprefix("BERTH_").lower())
                environment.setenv(secret["Name"], str((field and field.default) or "secret"))
            Settings()
            EcsSettings()


def test_key_files_come_from_folders_that_the_task_has(templates: Templates) -> None:
    for task in templates.resources("AWS::ECS::TaskDefinition").values():
        given = {
            variable["Name"]: text_of(variable["Value"])
            for container in task["ContainerDefinitions"]
            for variable in container.get("Environment", [])
        }
        if "BERTH_SECRET_FOLDERS" not in given:
            continue
        folders = set(json.loads(given["BERTH_SECRET_FOLDERS"]))
        assert {folder.removeprefix("/keys/") for folder in folders} <= set(FOLDERS)
        needed = {
            value.rpartition("/")[0] if value.endswith((".key", ".jwt")) else value
            for value in given.values()
            if value.startswith("/keys/")
        }
        # Whether there are webhooks is all that API and orchestrator ask of that file.
        assert needed - folders <= {"/keys/webhook"}, task["Family"]


def test_prepare_alone_logs_in_as_the_owner_of_the_tables(templates: Templates) -> None:
    names_by_container = {container["Name"]: names(container) for container in servers(templates)}
    assert {
        name for name, given in names_by_container.items() if "database_owner_url" in given
    } == {"prepare"}
    assert {name for name, given in names_by_container.items() if "database_url" in given} >= {
        "prepare",
        "api",
        "orchestrator",
    }
    both = {
        secret["Name"]: secret["ValueFrom"]
        for container in servers(templates)
        for secret in container.get("Secrets", [])
        if secret["Name"].startswith("BERTH_DATABASE_")
    }
    assert both["BERTH_DATABASE_OWNER_URL"] != both["BERTH_DATABASE_URL"]


def test_who_reads_which_keys(templates: Templates) -> None:
    keys_by_family = {}
    for task in templates.resources("AWS::ECS::TaskDefinition").values():
        for container in task["ContainerDefinitions"]:
            for variable in container.get("Environment", []):
                if variable["Name"] == "BERTH_SECRET_FOLDERS":
                    folders = json.loads(text_of(variable["Value"]))
                    family = task["Family"].removeprefix(f"berth-{templates.stage}-")
                    keys_by_family[family] = {folder.removeprefix("/keys/") for folder in folders}
    assert keys_by_family["api"] == {"messages", "api", "codec", "login"}
    assert keys_by_family["orchestrator"] == {"private", "messages", "codec", "login", "launch"}
    tiers = {
        "email": "email",
        "webhook": "webhook",
        "sms": "messaging",
        "whatsapp": "messaging",
        "push": "push",
    }
    assert {
        f"jobs-{tier}": {"fleet", folder} for tier, folder in tiers.items()
    }.items() <= keys_by_family.items()
    assert keys_by_family["jobs-default"] == {"fleet"}
    assert keys_by_family["prepare"] == set(FOLDERS)
