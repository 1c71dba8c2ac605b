# usage: wait.rb SECONDS RESULTS: waits as Ruby does, and tells how long it took; see ../waits.c
require "timeout"
SECONDS = ARGV[0].to_f
WAITS = {
  "ruby_sleep" => -> { sleep SECONDS },
  "ruby_select" => -> { IO.select(nil, nil, nil, SECONDS) },
  "ruby_queue" => -> { Queue.new.pop(timeout: SECONDS) rescue sleep(SECONDS) },
  "ruby_timeout" => -> { Timeout.timeout(SECONDS) { IO.pipe[0].read(1) } rescue nil },
}
WAITS.each do |name, wait|
  fork do
    began = Process.clock_gettime(Process::CLOCK_MONOTONIC)
    wait.call
    lasted = ((Process.clock_gettime(Process::CLOCK_MONOTONIC) - began) * 1e6).to_i
    File.open(ARGV[1], "a") { |file| file.syswrite("#{name} main 1 0 #{lasted}\n") }
  end
end
Process.waitall
