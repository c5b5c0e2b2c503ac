#!/bin/sh
# Registers the unit. The server is not started: its configuration should be read first.
set -e
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload || true
    if systemctl is-active --quiet tallygate; then
        systemctl restart tallygate || true
    fi
fi
