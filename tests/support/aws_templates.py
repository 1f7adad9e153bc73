"""Reads CloudFormation templates."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Resource = dict[str, Any]


@dataclass
class Templates:
    """Of one stage, or of all: `of`."""

    folder: Path
    stage: str = ""
    _read: dict[str, dict[str, Any]] = field(default_factory=dict)

    def of(self, stage: str) -> "Templates":
        return Templates(self.folder, stage, self._read)

    def template(self, part: str) -> dict[str, Any]:
        name = f"berth-{self.stage}-{part}"
        if name not in self._read:
            self._read[name] = json.loads(
                (self.folder / f"{name}.template.json").read_text("utf-8")
            )
        return self._read[name]

    def resources(
        self, kind: str, parts: tuple[str, ...] = ("base", "servers")
    ) -> dict[str, Resource]:
        """Logical id → properties, of both stacks or of `parts`."""
        return {
            name: resource.get("Properties", {})
            for part in parts
            for name, resource in self.template(part)["Resources"].items()
            if resource["Type"] == kind
        }

    def only(self, kind: str) -> Resource:
        [resource] = self.resources(kind).values()
        return resource

    def only_in(self, kind: str, part: str) -> Resource:
        [resource] = self.resources(kind, (part,)).values()
        return resource

    def task(self, family: str) -> Resource:
        task_family = f"berth-{self.stage}-{family}"
        tasks = self.resources("AWS::ECS::TaskDefinition").values()
        return next(task for task in tasks if task["Family"] == task_family)

    def container(self, family: str, name: str = "") -> Resource:
        containers: list[Resource] = self.task(family)["ContainerDefinitions"]
        return next(container for container in containers if container["Name"] == (name or family))

    def service(self, name: str) -> Resource:
        services = self.resources("AWS::ECS::Service").values()
        return next(service for service in services if service.get("ServiceName") == name)

    def statements(self, role_prefix: str) -> list[dict[str, Any]]:
        """Of the policies of roles whose logical id begins so, and which are no execution roles."""
        return [
            statement
            for policy in self.resources("AWS::IAM::Policy").values()
            if any(
                attached_role["Ref"].startswith(role_prefix) for attached_role in policy["Roles"]
            )
            for statement in policy["PolicyDocument"]["Statement"]
        ]


def text_of(value: Any) -> str:
    """A value with its references as text, for comparisons: `${Name.Attribute}`."""
    match value:
        case str():
            return value
        case {"Ref": name}:
            return f"${{{name}}}"
        case {"Fn::GetAtt": [name, attribute]}:
            return f"${{{name}.{attribute}}}"
        case {"Fn::ImportValue": name}:
            return f"${{{name}}}"
        case {"Fn::Join": [between, parts]}:
            return str(between).join(map(text_of, parts))
        case _:
            return json.dumps(value)


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
