"""The folder ``engine`` needs vLLM: `make vllm-test` runs it in an environment of its own."""

collect_ignore = ["engine"]
