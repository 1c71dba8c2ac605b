# usage: wait.sh SECONDS RESULTS: waits as bash does, and tells how long it took; see ../waits.c
now() { read -r up _ </proc/uptime && echo "${up/./}0000"; }
tell() { echo "$1 main $3 0 $(($(now) - $2))" >>"$results"; }
seconds=$1 results=$2
(began=$(now); sleep "$seconds"; tell bash_sleep "$began" 1) &
(began=$(now); read -r -t "$seconds" _ < <(sleep 10000); [ $? -gt 128 ] && good=1 || good=0; tell bash_read "$began" $good) &
(began=$(now); sleep "$seconds" & wait; tell bash_wait "$began" 1) &
wait
