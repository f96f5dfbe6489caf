"""Ray Serve LLM with one model on the CPU: `serve_ray_llm.py FOLDER NAME PORT`, in the environment of ray_llm.txt."""

from __future__ import annotations

import sys

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

folder, name, port = sys.argv[1:]
ray.init(include_dashboard=False, num_cpus=4, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
config = LLMConfig(
    model_loading_config={"model_id": name, "model_source": folder},
    accelerator_config={"kind": "cpu"},
    placement_group_config={"bundles": [{"CPU": 1}]},
    deployment_config={"num_replicas": 1},
    engine_kwargs={
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "block_size": 32,
        "enable_prompt_tokens_details": True,
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
    },
)
serve.run(build_openai_app({"llm_configs": [config]}), blocking=True)
