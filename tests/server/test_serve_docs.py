"""docs/serve.md names every option, path and metric that there is, and none that there is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer.main

from hetero import cli
from hetero.cli_launch import TOOLS
from hetero.server.app import create_app
from hetero.server.state import AppState
from tests.server.serving import serving

TEXT = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()


def section(title: str) -> str:
    return TEXT.split(f"## {title}\n")[1].split("\n## ")[0]


def command(name: str) -> Any:
    return typer.main.get_command(cli.app).commands[name]  # type: ignore[attr-defined]


def test_options() -> None:
    there = {word for option in command("serve").params for word in (*option.opts, *option.secondary_opts)}
    named = set(re.findall(r"--[a-z][a-z-]*", section("Options")))
    assert named <= there
    # The other half of a pair, and what every command has.
    assert {word for word in there if word.startswith("--")} - named <= {
        "--prefix-cache",
        "--trace",
        "--help",
    }


def test_paths() -> None:
    schema = create_app(AppState("x")).openapi()["paths"]
    named = set(re.findall(r"[` ](/[a-zA-Z_0-9/.]*)`", section("Endpoints")))
    there = {path.replace("{model}", "NAME") for path in schema}
    assert there <= named
    assert named - there == {"/openapi.json", "/", "/live"}


def test_metrics() -> None:
    table = section("Metrics").split("```")[0]
    named = set(re.findall(r"`([a-z_0-9]+)(?:\{[a-z_,]+\})?`", table))
    with serving(None) as running:
        text = running.client.get("/metrics").text
    there = set(re.findall(r"^# TYPE hetero:(\S+)", text, re.M))
    # What only a loaded checkpoint has, and one whose experts or tables are on disk.
    there |= {"expert_reads_total", "expert_read_bytes_total"}
    there |= {"expert_cache_hits_total", "expert_cache_misses_total", "expert_disk_wait_seconds_total"}
    tables = ("cache_hits_total", "cache_misses_total", "read_bytes_total", "disk_wait_seconds_total")
    there |= {f"table_{name}" for name in tables}
    assert there - {"hetero"} == named - {"hetero"}


def test_tools() -> None:
    assert all(f"`{tool}`" in section("Pointing a tool at it") for tool in TOOLS)
