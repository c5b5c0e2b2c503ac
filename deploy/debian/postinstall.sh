#!/bin/sh
# Registers the unit. Does not start the server, because the administrator should read its configuration first.
set -e
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload || true
    if systemctl is-active --quiet tallygate; then
        systemctl restart tallygate || true
    fi
fi
