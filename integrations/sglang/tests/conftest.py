"""The folder ``engine`` needs SGLang: `make sglang-test` runs it in an environment of its own."""

collect_ignore = ["engine"]
