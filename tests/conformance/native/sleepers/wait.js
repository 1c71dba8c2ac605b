// usage: wait.js SECONDS RESULTS: waits as Node.js does, and tells how long it took; see ../waits.c
const fs = require("fs");
const { Worker, isMainThread, workerData } = require("worker_threads");
const [seconds, results] = isMainThread ? [Number(process.argv[2]), process.argv[3]] : workerData;
const began = process.hrtime.bigint();
const tell = (name, place) => () =>
  fs.appendFileSync(results, `${name} ${place} 1 0 ${(process.hrtime.bigint() - began) / 1000n}\n`);
if (isMainThread) {
  setTimeout(tell("node_timer", "main"), 1000 * seconds);
  new Worker(__filename, { workerData: [seconds, results] });
} else {
  Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 1000 * seconds);
  tell("node_atomics", "thread")();
}
