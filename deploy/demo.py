"""What `pdserve demo` shows: one streamed answer, and the curl line that asks for it."""

import json
from typing import TextIO

import httpx

from pdserve.cluster.base.errors import InternalError
from pdserve.deploy.records import DeploymentRecord

DEFAULT_PROMPT = "The capital of France is"
MAX_TOKENS = 48
TIMEOUT_S = 120.0


def _body(record: DeploymentRecord, prompt: str) -> dict[str, str | int | bool]:
    return {"model": record.served_name, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}


def curl_line(record: DeploymentRecord) -> str:
    """Return a shell line that streams an answer."""
    body = json.dumps(_body(record, DEFAULT_PROMPT))
    return f"curl -N {record.url}/v1/completions -H 'content-type: application/json' -d '{body}'"


def stream_answer(record: DeploymentRecord, prompt: str, out: TextIO) -> None:
    """Print the prompt and its continuation as it arrives. Raises InternalError if the answer fails."""
    out.write(prompt)
    out.flush()
    with httpx.stream("POST", f"{record.url}/v1/completions", json=_body(record, prompt), timeout=TIMEOUT_S) as answer:
        if answer.status_code != 200:
            raise InternalError(f"the ingress answered {answer.status_code}: {answer.read().decode()}")
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise InternalError(event["error"]["message"])
            for choice in event["choices"]:
                out.write(choice["text"])
                out.flush()
    out.write("\n")
