cd /srv/llm
docker compose -f docker-compose.yml up -d sglang
