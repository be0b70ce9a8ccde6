"""Requests made from the server's own OpenAPI schema: none may end in a 5xx."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.server.outside import Server

SCHEMATHESIS = Path(sysconfig.get_path("scripts")) / "schemathesis"


@pytest.mark.slow
def test_no_request_of_the_schema_is_a_defect(tmp_path: Path) -> None:
    # Short answers: what is asked here is what gets through, not what comes out.
    with Server(
        "--ctx", "64", "--request-timeout", "2", "--log-file", str(tmp_path / "log")
    ).ready() as server:
        words = [SCHEMATHESIS, "run", f"{server.client.base_url}/openapi.json", "--no-color"]
        words += ["--checks", "not_a_server_error", "--continue-on-failure"]
        words += ["--phases", "examples,coverage,fuzzing", "--max-examples", "25", "--max-time", "45"]
        words += ["--generation-deterministic", "--request-timeout", "30", "--suppress-health-check", "all"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stdout[-6000:]
        server.idle()
        counted = [
            line for line in server.client.get("/metrics").text.splitlines() if "http_requests_total{" in line
        ]
        assert not [line for line in counted if 'status="5' in line]
        served = {line.split('route="')[1].split('"')[0] for line in counted}
        assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/health", "/v1/models"} <= served
        assert "Traceback" not in server.said()
