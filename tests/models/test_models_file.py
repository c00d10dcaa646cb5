"""The models' file: everything wrong with it is told at once, and what is right means what it says."""

from decimal import Decimal
from pathlib import Path

import pytest
from tests.cli.processes import tidefast

from tidefast.protocol.budget import Amount, Limit
from tidefast.protocol.chat import ChatCall, Usage
from tidefast.protocol.ids import RunId
from tidefast.services.models import cost, load_models
from tidefast.services.tools import ConfigError

GOOD = """
[upstreams.local]
url = "http://127.0.0.1:8080/v1/"
models = ["small", "large"]
unbilled = [503]
answer_tokens = 100
[prices.small]
input = 0.15
output = 1
[prices.large]
input = 3
output = 15.5
[budgets]
run = { calls = 5, money = 1.5 }
agent.desk = { tokens = 0 }
key.ci = { calls = 0 }
"""


def read(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "models.toml"
    file.write_text(text)
    return file


def test_a_file_means_what_it_says(tmp_path: Path) -> None:
    book = load_models(read(tmp_path, GOOD))
    assert book.upstreams["local"].url == "http://127.0.0.1:8080/v1/chat/completions"
    small, large = book.models["small"], book.models["large"]
    assert (small.contract.tool, small.contract.effect, small.contract.retries) == ("model:small", "model", 2)
    assert cost(small, Usage(10, 1)) == Amount(1, 11, 3)  # 2.5 millionths, rounded up
    assert cost(large, Usage(1_000_000, 0)).micros == 3_000_000
    assert book.estimate(small, ChatCall("small", False, False, None), 20) == Amount(1, 110, 102)
    assert book.limits(RunId("r"), "desk", "ci") == [
        ("run/r", Limit(5, None, 1_500_000)),
        ("agent/desk", Limit(None, 0, None)),
        ("key/ci", Limit(0, None, None)),
    ]
    assert book.limits(RunId("r"), "other", "") == [("run/r", Limit(5, None, 1_500_000)), ("agent/other", Limit())]
    assert small.price is not None and small.price.input == Decimal("0.15")


@pytest.mark.parametrize(
    "text,parts",
    [
        ("", ["expected at least one table like [upstreams.local]"]),
        ("upstreams = 1", ["upstreams: expected tables"]),
        ("[models]\na = 1", ["models: unknown table"]),
        ("not toml", ["expected TOML"]),
        ('[upstreams.a]\nurl = "ftp://x"\nmodels = []', ["url: expected http(s)://", "models: expected the names"]),
        ('[upstreams.a]\nurl = "http://u:p@h/"\nmodels = ["m"]', ["without credentials"]),
        ('[upstreams.a]\nurl = "http://h"\nmodels = ["m"]\nretires = 1', ["upstreams.a: ", "`retires`"]),
        ('[upstreams.a]\nurl = "http://h"\nmodels = ["m"]\nconcurrency = 0', [">= 1"]),
        (
            (
                '[upstreams.a]\nurl = "http://h"\nmodels = ["m", ""]\ntimeout = "soon"\nunbilled = [200]\n'
                'credential = { env = "NOT_SET_HERE", header = "a b" }'
            ),
            [
                "timeout: expected a duration from 1ms to 1h, like \"30s\", found 'soon'",
                "unbilled: expected statuses from 400 to 599, found 200",
                "expected the environment variable NOT_SET_HERE to be set",
                "credential: expected a header's name",
                "models: expected names of 1 to 200",
            ],
        ),
        (
            '[upstreams.a]\nurl = "http://h"\nmodels = ["m"]\n[upstreams.b]\nurl = "http://h"\nmodels = ["m"]',
            ["upstreams.b.models: m is served by upstreams.a already"],
        ),
        (
            '[upstreams.a]\nurl = "http://h"\nmodels = ["m"]\n[prices.x]\ninput = 1\noutput = -1',
            ["prices.x.output: expected an amount from 0", "prices.x: no upstream serves this model"],
        ),
        (
            '[upstreams.a]\nurl = "http://h"\nmodels = ["m"]\n[budgets]\nagent.desk = { money = 1 }',
            ["prices.m: expected a price, because budgets.agent.desk has money"],
        ),
        (
            '[upstreams.a]\nurl = "http://h"\nmodels = ["m"]\n[budgets]\nrun = { calls = -1 }',
            ["budgets: ", ">= 0"],
        ),
    ],
)
def test_everything_wrong_with_a_file_is_told_at_once(tmp_path: Path, text: str, parts: list[str]) -> None:
    file = read(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        load_models(file)
    lines = str(refused.value).splitlines()
    assert all(line.startswith(f"{file}: ") for line in lines)
    for part in parts:
        assert any(part in line for line in lines), (part, lines)


def test_a_limit_is_raised_and_read_on_the_command_line(tmp_path: Path) -> None:
    assert tidefast("run", "nowhere:app", "a", "1", "--store", "x.db", "--models", "no.toml", cwd=tmp_path).returncode
    made = tidefast("serve", "--store", "x.db", "--models", "no.toml", "--port", "0", cwd=tmp_path)
    assert (made.returncode, "no.toml: expected a readable file" in made.stderr) == (3, True)
    bad = tidefast("budgets", "--calls", "3", "--store", "x.db", cwd=tmp_path)
    assert (bad.returncode, "a limit without a name" in bad.stderr) == (2, True)
