#!/bin/sh
# Unregisters the unit. When the package is purged, also removes the snapshots. systemd keeps the files of a dynamic user
# in the folder `private`.
set -e
if [ "$1" = purge ]; then
    rm -rf /var/lib/private/tallygate /var/lib/tallygate
fi
if { [ "$1" = remove ] || [ "$1" = purge ]; } && [ -d /run/systemd/system ]; then
    systemctl daemon-reload || true
fi
