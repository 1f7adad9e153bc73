"""Logins that AWS makes, and references to them that CloudFormation resolves."""

from aws_cdk import Fn, RemovalPolicy
from aws_cdk import aws_secretsmanager as secrets
from constructs import Construct


def password(scope: Construct, name: str, user: str, policy: RemovalPolicy) -> secrets.Secret:
    """Creates a login made by AWS. Its password is letters and digits, because it stands in
    addresses."""
    return secrets.Secret(
        scope,
        name,
        generate_secret_string=secrets.SecretStringGenerator(
            secret_string_template=f'{{"username": "{user}"}}',
            generate_string_key="password",
            exclude_punctuation=True,
            password_length=40,
        ),
        removal_policy=policy,
    )


def password_of(login: secrets.Secret) -> str:
    """Returns a reference that CloudFormation resolves."""
    return Fn.join("", ["{{resolve:secretsmanager:", login.secret_arn, ":SecretString:password}}"])
