#!/bin/bash
cd /tmp/dev; export PYTHONPATH=/tmp/dev/src:/tmp/dev; exec "$@"
