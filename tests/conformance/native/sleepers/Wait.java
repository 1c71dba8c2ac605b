import java.io.FileWriter;
import java.nio.channels.Selector;
import java.util.concurrent.SynchronousQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.LockSupport;

/** usage: java Wait SECONDS RESULTS: waits as Java does, and tells how long it took; see ../waits.c */
class Wait {
    interface Step {
        void run(long milliseconds) throws Exception;
    }

    public static void main(String[] given) throws Exception {
        long milliseconds = (long) (1000 * Double.parseDouble(given[0]));
        start("java_sleep", milliseconds, given[1], Thread::sleep);
        start("java_park", milliseconds, given[1], rest -> {
            long end = System.nanoTime() + 1000000 * rest;
            while (end - System.nanoTime() > 0) LockSupport.parkNanos(end - System.nanoTime());
        });
        start("java_queue", milliseconds, given[1], rest -> new SynchronousQueue<>().poll(rest, TimeUnit.MILLISECONDS));
        start("java_selector", milliseconds, given[1], rest -> Selector.open().select(rest));
        start("java_monitor", milliseconds, given[1], rest -> {
            Object monitor = new Object();
            synchronized (monitor) {
                monitor.wait(rest);
            }
        });
    }

    static void start(String name, long milliseconds, String results, Step step) {
        new Thread(() -> {
            try {
                long began = System.nanoTime();
                step.run(milliseconds);
                String line = name + " thread 1 0 " + (System.nanoTime() - began) / 1000 + "\n";
                synchronized (Wait.class) {
                    try (FileWriter file = new FileWriter(results, true)) {
                        file.write(line);
                    }
                }
            } catch (Exception error) {
                error.printStackTrace();
            }
        }).start();
    }
}
