uv run sglang serve openai/gpt-oss-120b --tp 4 --host 0.0.0.0 --reasoning-parser gpt-oss --enable-metrics true
