// The calls of the API that this page makes, by name.

import { ahead, call, part, send, type Query } from "./client";
import type * as Api from "./schema";

const sandbox = (id: string): string => `/v1/sandboxes/${part(id)}`;
const checkpoint = (id: string): string => `/v1/checkpoints/${part(id)}`;

type Signalled = { signal?: AbortSignal };

export const sandboxes = (options: Signalled = {}) => call<Api.SandboxInfo[]>("GET", "/v1/sandboxes", options);
export const sandboxInfo = (id: string, options: Signalled = {}) => call<Api.SandboxInfo>("GET", sandbox(id), options);
export const create = (body: Partial<Api.CreateRequest> & { image: string }) =>
  call<Api.SandboxInfo>("POST", "/v1/sandboxes", { body });
export const remove = (id: string) => call("DELETE", sandbox(id));
export const kill = (id: string) => call("POST", `${sandbox(id)}/kill`);
export const setLifetime = (id: string, seconds: number | null) =>
  call<Api.SandboxInfo>("PUT", `${sandbox(id)}/lifetime`, { body: { seconds } });
export const metrics = (id: string, options: Signalled = {}) =>
  call<Api.Metrics>("GET", `${sandbox(id)}/metrics`, options);

export const processes = (id: string, options: Signalled = {}) =>
  call<Api.ProcessInfo[]>("GET", `${sandbox(id)}/processes`, options);
export const startProcess = (id: string, command: string) =>
  call<Api.ProcessInfo>("POST", `${sandbox(id)}/processes`, { body: { command } });
export const logs = (id: string, process: string, stdout = 0, stderr = 0) =>
  call<Api.Logs>("GET", `${sandbox(id)}/processes/${part(process)}/logs`, { query: { stdout, stderr } });
export const signalProcess = (id: string, process: string, number: number) =>
  call<Api.ProcessInfo>("POST", `${sandbox(id)}/processes/${part(process)}/signal`, { body: { signal: number } });
export const removeProcess = (id: string, process: string) =>
  call("DELETE", `${sandbox(id)}/processes/${part(process)}`);
export const openTerminal = (id: string, rows: number, columns: number) =>
  call<Api.ProcessInfo>("POST", `${sandbox(id)}/terminals`, { body: { rows, columns, env: { TERM: "xterm-256color" } } });
export const terminalPath = (id: string, terminal: string): string =>
  `${sandbox(id)}/terminals/${part(terminal)}/attach`;

export const entries = (id: string, path: string) =>
  call<Api.FileInfo[]>("GET", `${sandbox(id)}/entries`, { query: { path } });
export const readFile = async (id: string, path: string, query: Query = {}) =>
  (await send("GET", `${sandbox(id)}/files`, { query: { path, ...query } })).arrayBuffer();
export const writeFile = (id: string, path: string, raw: BodyInit, query: Query = {}) =>
  call("PUT", `${sandbox(id)}/files`, { query: { path, ...query }, raw });
export const removeFile = (id: string, path: string) =>
  call("DELETE", `${sandbox(id)}/files`, { query: { path, recursive: true } });
export const makeDirectory = (id: string, path: string) =>
  call("PUT", `${sandbox(id)}/entries`, { query: { path } });
export const download = (id: string, path: string) => send("GET", `${sandbox(id)}/tree`, { query: { path } });

export const ports = (id: string, options: Signalled = {}) => call<number[]>("GET", `${sandbox(id)}/ports`, options);
export const portLink = (id: string, port: number) => call<Api.PortLink>("GET", `${sandbox(id)}/ports/${port}/link`);
export const network = (id: string, options: Signalled = {}) =>
  call<Api.NetworkStatus>("GET", `${sandbox(id)}/network`, options);
export const setNetwork = (id: string, body: Api.Network) =>
  call<Api.NetworkStatus>("PUT", `${sandbox(id)}/network`, { body });

export const checkpoints = (id: string, options: Signalled = {}) =>
  call<Api.CheckpointInfo[]>("GET", `${sandbox(id)}/checkpoints`, options);
export const turns = (id: string, options: Signalled = {}) =>
  call<Api.TurnInfo[]>("GET", `${sandbox(id)}/turns`, options);
/** Asks for the tree before it is known whether there is such a sandbox. */
export const treeAhead = (id: string) => ["checkpoints", "turns"].forEach((name) => ahead(`${sandbox(id)}/${name}`));
export const takeCheckpoint = (id: string, label: string) =>
  call<Api.CheckpointInfo>("POST", `${sandbox(id)}/checkpoints`, { body: label ? { label } : {} });
export const restore = (id: string, target: string | null, verify = false) =>
  call<Api.RestoreResult>("POST", `${sandbox(id)}/restore`, { body: { checkpoint: target, verify } });
export const fork = (id: string, count: number, more: Omit<Api.ForkRequest, "count"> = {}) =>
  call<Api.ForkEntry[]>("POST", `${checkpoint(id)}/fork`, { body: { count, ...more } });
export const label = (id: string, text: string | null) =>
  call<Api.CheckpointInfo>("PUT", `${checkpoint(id)}/label`, { body: { label: text } });
export const removeCheckpoint = (id: string) => call("DELETE", checkpoint(id));
export const exportCheckpoint = (id: string) => send("POST", `${checkpoint(id)}/export`, { raw: "" });
export const diff = (id: string, from: string, to: string | null, why: boolean) =>
  call<Api.Change[]>("GET", `${sandbox(id)}/diff`, { query: { checkpoint: from, to, why } });
export const versions = (id: string, from: string, to: string | null, path: string) =>
  call<Api.FileVersions>("GET", `${sandbox(id)}/diff/file`, { query: { checkpoint: from, to, path } });

export const exchanges = (id: string, options: Signalled = {}) =>
  call<Api.ExchangeInfo[]>("GET", `${sandbox(id)}/gateway/exchanges`, options);
export const exchange = (id: string, item: number) =>
  call<Api.Exchange>("GET", `${sandbox(id)}/gateway/exchanges/${item}`);

export const images = (options: Signalled = {}) => call<Api.ImageInfo[]>("GET", "/v1/images", options);
export const builds = (options: Signalled = {}) => call<Api.BuildInfo[]>("GET", "/v1/builds", options);
export const buildLog = (id: string, begin: number, options: Signalled = {}) =>
  call<Api.BuildLines>("GET", `/v1/builds/${part(id)}/log`, { query: { begin }, ...options });
export const removeImage = (name: string) => call("DELETE", `/v1/images/${part(name)}`);
export const tokens = (options: Signalled = {}) => call<Api.ApiToken[]>("GET", "/v1/tokens", options);
export const createToken = (body: Api.TokenRequest) => call<Api.NewToken>("POST", "/v1/tokens", { body });
export const revokeToken = (id: string) => call<Api.ApiToken>("DELETE", `/v1/tokens/${part(id)}`);
export const statistics = (options: Signalled = {}) => call<Api.Statistics>("GET", "/v1/statistics", options);
export const usage = (options: Signalled = {}) => call<Api.SandboxUsage[]>("GET", "/v1/usage", options);
export const hostUsage = (options: Signalled = {}) => call<Api.HostUsage>("GET", "/v1/usage/host", options);
export const doctor = () => call<Api.DoctorFinding[]>("GET", "/v1/doctor");

export const clusterHosts = (options: Signalled = {}) => call<Api.HostInfo[]>("GET", "/v1/cluster/hosts", options);
export const hostDoctor = (name: string) => call<Api.DoctorFinding[]>("GET", `/v1/cluster/hosts/${part(name)}/doctor`);
export const drain = (name: string, draining: boolean) =>
  call<Api.HostInfo>("PATCH", `/v1/cluster/hosts/${part(name)}`, { body: { draining } });
export const places = (options: Signalled = {}) => call<Api.PlaceInfo[]>("GET", "/v1/cluster/places", options);
export const copies = (options: Signalled = {}) => call<Api.CopyInfo[]>("GET", "/v1/cluster/copies", options);
export const move = (id: string, host: string) =>
  call<Api.MoveResult>("POST", "/v1/cluster/moves", { body: { sandbox: id, host } });
export const jobs = (options: Signalled = {}) => call<Api.JobInfo[]>("GET", "/v1/cluster/jobs", options);
export const cancelJob = (id: string) => call<Api.JobInfo>("DELETE", `/v1/cluster/jobs/${part(id)}`);
export const jobLog = async (id: string, from: number, options: Signalled = {}) =>
  (await send("GET", `/v1/cluster/jobs/${part(id)}/log`, { query: { from }, ...options })).arrayBuffer();
export const phases = (options: Signalled = {}) => call<Api.PhaseInfo[]>("GET", "/v1/cluster/phases", options);
export const pastPhases = (options: Signalled = {}) => call<Api.PastPhase[]>("GET", "/v1/cluster/phases/past", options);

export interface RunMetrics {
  steps: Record<string, unknown>[];
  summary: Record<string, unknown> | null;
}

export const runMetrics = (options: Signalled = {}) => call<RunMetrics>("GET", "/v1/run/metrics", options);
export const runGrid = (options: Signalled = {}) => call<Api.RunGrid>("GET", "/v1/run/trajectories", options);
export const runTrajectory = (prompt: string, member: string) =>
  call<Api.Trajectory>("GET", `/v1/run/trajectories/${part(prompt)}/${part(member)}`);
export const runGroup = (prompt: string) => call<Api.RunMember[]>("GET", `/v1/run/trajectories/${part(prompt)}`);
export const runStates = (prompt: string, member: string) =>
  call<Api.RunStates>("GET", `/v1/run/trajectories/${part(prompt)}/${part(member)}/states`);
export const runPieces = (prompt: string, member: string) =>
  call<Api.RunPieces>("GET", `/v1/run/trajectories/${part(prompt)}/${part(member)}/pieces`);
export const runStatus = (options: Signalled = {}) => call<Api.Status>("GET", "/v1/run/status", options);
export const runTimes = (options: Signalled = {}) => call<Api.RunTimes>("GET", "/v1/run/times", options);
