#!/bin/sh
# Builds the shim and the runtime layer of all sandboxes into PREFIX. Needs a C compiler, python3 and root (device nodes).
# usage: build.sh PREFIX
set -eu
prefix=$1
here=$(dirname "$(readlink -f "$0")")
mkdir -p "$prefix/bin"
cc -std=gnu11 -O2 -Wall -Wextra -static -o "$prefix/bin/pagurus-shim.new" \
    "$here"/shim.c "$here"/mounts.c "$here"/unneeded.c "$here"/spawn.c "$here"/confine.c
mv "$prefix/bin/pagurus-shim.new" "$prefix/bin/pagurus-shim"
cc -std=gnu11 -O2 -Wall -Wextra -static -o "$prefix/bin/pagurus-criu-root.new" "$here"/criu-root.c
mv "$prefix/bin/pagurus-criu-root.new" "$prefix/bin/pagurus-criu-root"
mkdir -p "$prefix/criu-plugins"
cc -std=gnu11 -O2 -Wall -Wextra -shared -fPIC -fvisibility=hidden -o "$prefix/criu-plugins/waits.so.new" \
    "$here"/waits.c "$here"/rearm.c "$here"/patience.c "$here"/attach.c
mv "$prefix/criu-plugins/waits.so.new" "$prefix/criu-plugins/waits.so"
mkdir -p "$prefix/lib"
cc -std=gnu11 -O2 -Wall -Wextra -shared -fPIC -fvisibility=hidden -o "$prefix/lib/frozen.so.new" \
    "$here"/frozen.c "$here"/rearm.c "$here"/patience.c
mv "$prefix/lib/frozen.so.new" "$prefix/lib/frozen.so"
cc -std=gnu11 -O2 -Wall -Wextra -shared -fPIC -fvisibility=hidden -o "$prefix/lib/written.so.new" \
    "$here"/written.c "$here"/terminals.c "$here"/current.c
mv "$prefix/lib/written.so.new" "$prefix/lib/written.so"
cc -std=gnu11 -O2 -Wall -Wextra -shared -fPIC -fvisibility=hidden -o "$prefix/lib/rooted.so.new" \
    "$here"/rooted.c "$here"/terminals.c "$here"/controlling.c
mv "$prefix/lib/rooted.so.new" "$prefix/lib/rooted.so"
cc -std=gnu11 -O2 -Wall -Wextra -shared -fPIC -fvisibility=hidden -o "$prefix/lib/terminals.so.new" \
    "$here"/terminals.c "$here"/controlling.c
mv "$prefix/lib/terminals.so.new" "$prefix/lib/terminals.so"

mkdir -p "$prefix/runtime"
cc -std=gnu11 -O2 -Wall -Wextra -static -nostdlib -ffreestanding -fno-stack-protector -fno-asynchronous-unwind-tables \
    -Wl,--build-id=none -Wl,-z,noseparate-code -Wl,-Tbss=0x500000 -o "$prefix/runtime/init.new" "$here/init.c"
mv "$prefix/runtime/init.new" "$prefix/runtime/init"
for program in attend relay; do
    cc -std=gnu11 -O2 -Wall -Wextra -static -nostdlib -ffreestanding -fno-stack-protector \
        -fno-asynchronous-unwind-tables -Wl,--build-id=none -Wl,-z,noseparate-code \
        -o "$prefix/runtime/$program.new" "$here/$program.c"
    mv "$prefix/runtime/$program.new" "$prefix/runtime/$program"
done
python3 "$here/../container/layer.py" "$prefix/runtime" "$prefix"
