#!/bin/sh
# Builds the shim and the runtime layer of all sandboxes into PREFIX. Needs a C compiler and root (device nodes).
# usage: build.sh PREFIX
set -eu
prefix=$1
here=$(dirname "$(readlink -f "$0")")
mkdir -p "$prefix/bin" "$prefix/layers"
cc -std=gnu11 -O2 -Wall -Wextra -static -o "$prefix/bin/pagurus-shim.new" \
    "$here"/shim.c "$here"/mounts.c "$here"/unneeded.c "$here"/spawn.c "$here"/confine.c
mv "$prefix/bin/pagurus-shim.new" "$prefix/bin/pagurus-shim"
cc -std=gnu11 -O2 -Wall -Wextra -static -o "$prefix/bin/pagurus-criu-root.new" "$here"/criu-root.c
mv "$prefix/bin/pagurus-criu-root.new" "$prefix/bin/pagurus-criu-root"
mkdir -p "$prefix/criu-plugins"
cc -std=gnu11 -O2 -Wall -Wextra -shared -fPIC -fvisibility=hidden -o "$prefix/criu-plugins/waits.so.new" \
    "$here"/waits.c "$here"/rearm.c "$here"/patience.c
mv "$prefix/criu-plugins/waits.so.new" "$prefix/criu-plugins/waits.so"
mkdir -p "$prefix/lib"
cc -std=gnu11 -O2 -Wall -Wextra -shared -fPIC -fvisibility=hidden -o "$prefix/lib/frozen.so.new" \
    "$here"/frozen.c "$here"/rearm.c "$here"/patience.c
mv "$prefix/lib/frozen.so.new" "$prefix/lib/frozen.so"

# Sandboxes and their checkpoints stay with the layer that they were made with, so each is kept by its content.
layer=$prefix/layers/new.$$
trap 'rm -rf "$layer"' EXIT
mkdir -p "$layer/.pagurus/empty" "$layer/dev/pts" "$layer/dev/shm" "$layer/proc" "$layer/sys"
chmod 755 "$layer" "$layer/.pagurus" "$layer/dev" "$layer/dev/pts"
chmod 555 "$layer/.pagurus/empty" "$layer/proc" "$layer/sys"
chmod 1777 "$layer/dev/shm"
cc -std=gnu11 -O2 -Wall -Wextra -static -nostdlib -ffreestanding -fno-stack-protector -fno-asynchronous-unwind-tables \
    -Wl,--build-id=none -Wl,-z,noseparate-code -Wl,-Tbss=0x500000 -o "$layer/.pagurus/init" "$here/init.c"
cc -std=gnu11 -O2 -Wall -Wextra -static -nostdlib -ffreestanding -fno-stack-protector -fno-asynchronous-unwind-tables \
    -Wl,--build-id=none -Wl,-z,noseparate-code -o "$layer/.pagurus/attend" "$here/attend.c"
node() {
    mknod "$layer/dev/$1" c "$2" "$3"
    chmod 666 "$layer/dev/$1"
}
node null 1 3
node zero 1 5
node full 1 7
node random 1 8
node urandom 1 9
# No /dev/tty: CRIU cannot dump a process that holds it open while another one has the terminal's foreground. Shells
# and pagers then take the terminal from their own descriptors. Dangling, so that nobody makes a file of that name.
ln -sfn /proc/self/ctty "$layer/dev/tty"
ln -sfn pts/ptmx "$layer/dev/ptmx"
# Names are asked of the daemon, which listens there in each sandbox's network namespace; without a network nobody
# does, and the question fails at once. An image's own file names servers of wherever it was built.
mkdir -m 755 "$layer/etc"
printf 'nameserver 127.0.0.53\noptions timeout:2 attempts:5\n' >"$layer/etc/resolv.conf"
chmod 644 "$layer/etc/resolv.conf"
# Each sandbox's own, and that of each fork: see sandbox/container/identity.py.
ln -sfn /proc/sys/kernel/domainname "$layer/etc/machine-id"
ln -sfn /proc/self/fd "$layer/dev/fd"
ln -sfn /proc/self/fd/0 "$layer/dev/stdin"
ln -sfn /proc/self/fd/1 "$layer/dev/stdout"
ln -sfn /proc/self/fd/2 "$layer/dev/stderr"

name=$(cd "$layer" && { find . -printf '%p %y %#m %l\n' | sort && cat .pagurus/init .pagurus/attend etc/resolv.conf; } |
    sha256sum | cut -c1-32)
[ -d "$prefix/layers/$name" ] || mv -T "$layer" "$prefix/layers/$name"
if [ -d "$prefix/layer" ] && [ ! -L "$prefix/layer" ]; then mv "$prefix/layer" "$prefix/layers/unnamed.$$"; fi
ln -s "layers/$name" "$prefix/layer.$$"
mv -T "$prefix/layer.$$" "$prefix/layer"
