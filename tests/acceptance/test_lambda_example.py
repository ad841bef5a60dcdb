"""The example of a function on Lambda: its template says what it claims, and its code runs as Lambda would run it."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from sqlalchemy import Engine, make_url, text

from support.aws.lambda_events import item_id
from support.documents import blocks
from txbox_local import LocalAws
from txbox_workers.options import MAX_ATTEMPTS

pytestmark = pytest.mark.slow  # `make test-pages` runs them, as does CI

EXAMPLE = Path(__file__).parents[2] / "examples" / "lambda_billing"
TEMPLATE = EXAMPLE / "template.yaml"

IN_LAMBDA = """
import json, sys
from support.aws.lambda_events import Context
sys.path.insert(0, sys.argv[1])
import app
for line in sys.stdin:
    print(json.dumps(app.handler(json.loads(line), Context(30))), app.engine.pool.checkedin(), flush=True)
"""


# --- the template ----------------------------------------------------------------------------------------------------


class Loader(yaml.SafeLoader):
    """Reads ``!Ref X`` as ``{"!Ref": "X"}``, and ``!GetAtt X.Arn`` likewise."""


Loader.add_multi_constructor("!", lambda loader, tag, node: {f"!{tag}": loader.construct_scalar(node)})


def read() -> dict[str, Any]:
    template = yaml.load(TEMPLATE.read_text(), Loader=Loader)  # a safe one
    assert isinstance(template, dict)
    return template


def resource(name: str) -> dict[str, Any]:
    return read()["Resources"][name]["Properties"]


def complaints(template: str) -> list[str]:
    from cfnlint import api  # a second or two, of each process that collects this file

    return [f"{match.rule.id} {match.message}" for match in api.lint(template, regions=["eu-central-1"])]


def test_cloudformations_linter_has_nothing_to_say() -> None:
    assert complaints(TEMPLATE.read_text()) == []


def test_everything_that_is_referred_to_exists() -> None:
    """The linter does not look into the events of a function: it would have to expand them as SAM does."""
    template = read()
    known = {*template["Parameters"], *template["Resources"]}
    referred = set(references(template))
    assert {"Purchases", "DatabaseSecretArn", "MaximumConcurrency"} <= referred <= known
    assert set(template["Parameters"]) <= referred, "and every parameter is used"


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in ("!Ref", "!GetAtt"):
                yield inner.partition(".")[0]
            else:
                yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_the_function_and_its_trigger_have_properties_that_there_are() -> None:
    """https://docs.aws.amazon.com/serverless-application-model/latest/developerguide/sam-resource-function.html"""
    function = resource("Billing")
    assert set(function) == {
        *("Architectures", "CodeUri", "Environment", "Events", "Handler", "MemorySize", "Policies", "Runtime"),
        *("Timeout", "VpcConfig"),
    }
    trigger = function["Events"]["Purchases"]["Properties"]
    assert set(trigger) == {"BatchSize", "FunctionResponseTypes", "Queue", "ScalingConfig"}
    assert trigger["Queue"] == {"!GetAtt": "Purchases.Arn"}


def test_lambda_reads_the_answer() -> None:
    trigger = resource("Billing")["Events"]["Purchases"]
    assert trigger["Type"] == "SQS"
    assert trigger["Properties"]["FunctionResponseTypes"] == ["ReportBatchItemFailures"]


def test_a_message_stays_hidden_for_six_times_the_time_out() -> None:
    assert resource("Purchases")["VisibilityTimeout"] >= 6 * resource("Billing")["Timeout"]


def test_the_queues_dead_letters_come_after_ours() -> None:
    policy = resource("Purchases")["RedrivePolicy"]
    assert policy["deadLetterTargetArn"] == {"!GetAtt": "DeadLetters.Arn"}
    assert policy["maxReceiveCount"] > MAX_ATTEMPTS


def test_concurrency_is_bounded_for_the_databases_connections_and_nothing_is_throttled() -> None:
    function = resource("Billing")
    assert function["Events"]["Purchases"]["Properties"]["ScalingConfig"] == {
        "MaximumConcurrency": {"!Ref": "MaximumConcurrency"}
    }
    assert "ReservedConcurrentExecutions" not in function
    assert set(function["VpcConfig"]) == {"SubnetIds", "SecurityGroupIds"}


def test_no_secret_is_in_the_template_or_in_the_environment() -> None:
    variables = resource("Billing")["Environment"]["Variables"]
    assert variables["DATABASE_SECRET_ARN"] == {"!Ref": "DatabaseSecretArn"}
    assert not any("password" in f"{name} {value}".lower() for name, value in variables.items())
    assert "resolve:" not in TEMPLATE.read_text(), "what is resolved stands in the function's configuration"


def test_the_handler_that_is_named_exists() -> None:
    module, _, name = resource("Billing")["Handler"].partition(".")
    assert f"\n{name} = sqs_handler(" in (EXAMPLE / f"{module}.py").read_text()


# --- the function ----------------------------------------------------------------------------------------------------


@pytest.fixture
def environment(schema_url: str, engine: Engine, aws: LocalAws) -> dict[str, str]:
    url = make_url(schema_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE account (account_id text PRIMARY KEY, purchases int, cents bigint)"))
    secrets = boto3.client("secretsmanager")
    secret = json.dumps({"username": url.username, "password": url.password})
    arn = secrets.create_secret(Name=f"test-{uuid.uuid4().hex}", SecretString=secret)["ARN"]
    secrets.close()
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PG", "TXBOX_"))},
        **aws.environment(),
        "DATABASE_HOST": str(url.host),
        "DATABASE_PORT": str(url.port),
        "DATABASE_NAME": str(url.database),
        "DATABASE_SECRET_ARN": arn,
        "PGOPTIONS": str(url.query["options"]),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


Invoke = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture
def invoke(environment: dict[str, str]) -> Iterator[Invoke]:
    with subprocess.Popen(
        [sys.executable, "-c", IN_LAMBDA, str(EXAMPLE)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def invoke(event: dict[str, Any]) -> dict[str, Any]:
            stdin.write(f"{json.dumps(event)}\n")
            stdin.flush()
            answer, _, kept = stdout.readline().rpartition(" ")
            assert int(kept) == 1, "the connection is kept for the next event"
            said: dict[str, Any] = json.loads(answer)
            return said

        yield invoke
        stdin.close()
        assert process.wait(20) == 0


def readmes(title: str) -> str:
    """A block of the example's README, by its title."""
    return next(block.text for block in blocks(EXAMPLE / "README.md") if block.title == title)


def test_what_the_readme_shows_without_aws_works(
    environment: dict[str, str], schema_url: str, engine: Engine, tmp_path: Path
) -> None:
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE account"))  # it makes its own
    for name in ("app.py", "event.json"):
        shutil.copy(EXAMPLE / name, tmp_path)
    (tmp_path / "without_aws.py").write_text(readmes("without_aws.py"))
    known = {name: value for name, value in environment.items() if not name.startswith("DATABASE_")}
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "without_aws.py"],
            cwd=tmp_path,
            env={**known, "TXBOX_DATABASE_URL": schema_url},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.stdout.splitlines() == 2 * ["{'batchItemFailures': []}"] + ["[('ann', 1, 2500)]"], ran.stderr


def test_the_requirements_name_the_wheel_that_the_clone_makes(tmp_path: Path) -> None:
    """By its path: txbox is in no package index, and whatever may be found there under its name is not ours."""
    (required,) = (EXAMPLE / "requirements.txt").read_text().split("\n\n")[-1].splitlines()
    build = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "wheels"), str(EXAMPLE.parents[1])]
    made = subprocess.run([sys.executable, *build], capture_output=True, text=True, timeout=120, check=False)
    assert made.returncode == 0, made.stderr
    assert (tmp_path / required).is_file(), "write the new version into requirements.txt"


def test_the_example_adds_each_purchase_once(invoke: Invoke, engine: Engine) -> None:
    event = json.loads((EXAMPLE / "event.json").read_text())
    (purchase,) = event["Records"]
    assert invoke(event) == {"batchItemFailures": []}
    assert invoke(event) == {"batchItemFailures": []}
    wrong = {**purchase, "messageId": item_id("p-2"), "body": '{"account_id": "ann"}', "receiptHandle": "another"}
    wrong["messageAttributes"] = {"message-id": {**purchase["messageAttributes"]["message-id"], "stringValue": "p-2"}}
    assert invoke({"Records": [purchase, wrong]}) == {"batchItemFailures": [{"itemIdentifier": item_id("p-2")}]}
    with engine.connect() as connection:
        assert connection.execute(text("SELECT * FROM account")).fetchall() == [("ann", 1, 2500)]
        assert connection.execute(text("SELECT message_id FROM processed_message")).scalars().all() == ["p-1"]
