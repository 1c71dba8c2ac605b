// usage: wait-go SECONDS RESULTS: waits as Go does, and tells how long it took; see ../waits.c
package main

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
	"time"
)

func main() {
	seconds, _ := strconv.ParseFloat(os.Args[1], 64)
	length := time.Duration(seconds * float64(time.Second))
	var all sync.WaitGroup
	waits := map[string]func() bool{
		"go_sleep": func() bool { time.Sleep(length); return true },
		"go_timer": func() bool { <-time.After(length); return true },
		"go_deadline": func() bool {
			listener, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				return false
			}
			listener.(*net.TCPListener).SetDeadline(time.Now().Add(length))
			_, err = listener.Accept()
			return os.IsTimeout(err)
		},
	}
	for name, wait := range waits {
		all.Add(1)
		go func(name string, wait func() bool) {
			defer all.Done()
			began, good := time.Now(), 0
			if wait() {
				good = 1
			}
			lasted := time.Since(began).Microseconds()
			file, _ := os.OpenFile(os.Args[2], os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0600)
			fmt.Fprintf(file, "%s thread %d 0 %d\n", name, good, lasted)
		}(name, wait)
	}
	all.Wait()
}
