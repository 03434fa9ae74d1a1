#!/usr/bin/env bash
# Generates proto/v1/*_pb2.py and *_pb2.pyi into $1/proto/v1 (default: this checkout).
# PYTHON has grpcio-tools <= 1.62 (scripts/requirements/proto.txt): newer ones write code that demands their own protobuf.
set -euo pipefail
out="$(realpath -m "${1:-"$(dirname "$0")/.."}")"
cd "$(dirname "$0")/.."
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3}" -m grpc_tools.protoc -Iweight_sync/proto=proto \
  --python_out="$scratch" --pyi_out="$scratch" proto/v1/*.proto
mkdir -p "$out/proto/v1"
rm -f "$out"/proto/v1/*_pb2.py "$out"/proto/v1/*_pb2.pyi # a message file that went takes its code along
cp "$scratch"/weight_sync/proto/v1/*_pb2.py* "$out/proto/v1/"
