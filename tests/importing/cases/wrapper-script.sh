#!/bin/bash
export CUDA_VISIBLE_DEVICES=0
exec /opt/serving/start_server.sh --prod
