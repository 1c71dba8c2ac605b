// A line over the steps of a run, by uPlot, which draws on a canvas.

import { useEffect, useRef } from "preact/hooks";
import UPlot from "uplot";
import "uplot/dist/uPlot.min.css";

const HEIGHT = 170;

export function Chart({ title, x, y }: { title: string; x: number[]; y: (number | null)[] }) {
  const element = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const at = element.current!;
    const style = getComputedStyle(document.documentElement);
    const [text, line, accent] = ["--dim", "--line", "--accent"].map((name) => style.getPropertyValue(name).trim());
    const axis = { stroke: text!, grid: { stroke: line!, width: 1 }, ticks: { stroke: line! } };
    const plot = new UPlot(
      {
        width: at.clientWidth,
        height: HEIGHT,
        legend: { show: false },
        scales: { x: { time: false } },
        axes: [axis, axis],
        series: [{}, { stroke: accent!, width: 2, points: { size: 5 }, spanGaps: true }],
      },
      [x, y],
      at,
    );
    const observer = new ResizeObserver(() => plot.setSize({ width: at.clientWidth, height: HEIGHT }));
    observer.observe(at);
    return () => {
      observer.disconnect();
      plot.destroy();
    };
  }, [x, y]);
  return (
    <figure class="chart">
      <figcaption>{title}</figcaption>
      <div ref={element} />
    </figure>
  );
}
