#!/bin/sh
# For the profile `processes`, as root, once after each start of the machine: a cgroup in which the node's
# container (user 10001) may limit the memory of its workers. Without it the node does not start. The argument
# is the group's name: another one for each further project on this machine.
set -eu
name=${1:-berth}
if [ -d /sys/fs/cgroup/memory ]; then
  group=/sys/fs/cgroup/memory/$name
  mkdir -p "$group"
else
  # v2: who moves a process needs the right in the group above both places, so the container lies in it too.
  group=/sys/fs/cgroup/$name.slice
  mkdir -p "$group"
  echo +memory >/sys/fs/cgroup/cgroup.subtree_control
  echo +memory >"$group/cgroup.subtree_control"
  echo "BERTH_NODE_CGROUP_PARENT=$name.slice"
fi
chown 10001:10001 "$group" "$group/cgroup.procs"
echo "BERTH_NODE_CGROUP=$group"
