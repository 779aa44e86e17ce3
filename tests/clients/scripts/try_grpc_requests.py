"""`grpc-requests`: uses the gRPC API through reflection, without any of Baton's files."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_requests import Client

from checks import ANSWER, MAX_TOKENS, QUESTION, System, refusal, run

SERVICE = "baton.v1.Inference"
CHAT = {"messages": [{"role": "user", "content": QUESTION}]}
SAMPLING = {"max_tokens": MAX_TOKENS, "temperature": 0.0}


def services_are_found(system: System) -> None:
    client = Client.get_by_endpoint(system.grpc)
    assert SERVICE in client.service_names
    assert {"Generate", "GenerateBatch", "Tokenize", "ListModels"} <= set(
        client.get_methods_meta(SERVICE)
    )


def models_are_listed(system: System) -> None:
    client = Client.get_by_endpoint(system.grpc)
    (model,) = client.request(SERVICE, "ListModels", {})["models"]
    assert model["max_model_len"] > 0


def a_stream(system: System) -> None:
    client = Client.get_by_endpoint(system.grpc)
    request = {"chat": CHAT, "sampling_params": SAMPLING}
    responses = list(client.unary_stream(SERVICE, "Generate", request))
    assert ANSWER in "".join(response.get("text", "") for response in responses)
    assert responses[-1]["finish_reason"] == "FINISH_REASON_STOP"
    assert responses[-1]["receipt"]["decode"]["push"]["num_bytes"]


def a_service_client(system: System) -> None:
    service = Client.get_by_endpoint(system.grpc).service(SERVICE)
    ids = service.Tokenize({"prompt": {"text": "Hello"}})["token_ids"]
    assert service.CountTokens({"prompt": {"text": "Hello"}})["num_tokens"] == len(ids)
    batch = {"prompts": [{"text": "1, 2,"}, {"chat": CHAT}], "sampling_params": SAMPLING}
    responses = list(service.GenerateBatch(batch))
    second = [response for response in responses if response.get("prompt_index") == 1]
    assert ANSWER in "".join(response.get("text", "") for response in second)


def errors_have_their_status(system: System) -> None:
    client = Client.get_by_endpoint(system.grpc)
    wrong = {"text": "x", "sampling_params": {"max_tokens": 4, "temperature": -1.0}}
    error: Any = refusal(
        grpc.RpcError, lambda: list(client.unary_stream(SERVICE, "Generate", wrong))
    )
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "temperature" in error.details()


if __name__ == "__main__":
    run(
        services_are_found,
        models_are_listed,
        a_stream,
        a_service_client,
        errors_have_their_status,
    )
