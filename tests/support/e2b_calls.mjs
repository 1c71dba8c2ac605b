// As e2b_calls.py, for the client of JavaScript: each call once, and what came of it as lines of JSON.
import { Sandbox } from 'e2b'

function need(holds, what) {
  if (!holds) throw new Error(`not so: ${what}`)
}

async function refused(act) {
  try {
    await act()
  } catch (error) {
    return error
  }
  throw new Error('it was not refused')
}

const calls = {
  async foreground(sandbox) {
    const seen = []
    const result = await sandbox.commands.run('echo out; echo err >&2; id -un; pwd; echo $COLOUR', {
      onStdout: (data) => { seen.push(data) },
    })
    need(result.stdout === 'out\nuser\n/home/user\nred\n' && result.stderr === 'err\n', JSON.stringify(result))
    need(seen.join('') === result.stdout, seen)
    need((await refused(() => sandbox.commands.run('exit 7'))).exitCode === 7, 'exit code')
  },
  async background(sandbox) {
    const handle = await sandbox.commands.run('cat', { background: true, stdin: true })
    await sandbox.commands.sendStdin(handle.pid, 'line\n')
    while (handle.stdout !== 'line\n') await new Promise((resolve) => setTimeout(resolve, 10))
    need((await sandbox.commands.list()).some((each) => each.pid === handle.pid), 'listed')
    need(await handle.kill(), 'killed')
    need(!(await sandbox.commands.list()).some((each) => each.pid === handle.pid), 'gone')
  },
  async files(sandbox) {
    await sandbox.files.write('/tmp/a', 'text')
    await sandbox.files.write([{ path: 'b', data: '1' }, { path: '/tmp/c', data: '2' }])
    need((await sandbox.files.read('/tmp/a')) === 'text' && (await sandbox.files.read('/tmp/c')) === '2', 'read')
    need(await sandbox.files.makeDir('d') && !(await sandbox.files.makeDir('d')), 'made once')
    await sandbox.files.rename('b', 'd/e')
    need((await sandbox.files.list('d')).map((each) => each.path).join() === '/home/user/d/e', 'listed')
    await sandbox.files.remove('d')
    need(!(await sandbox.files.exists('d')), 'removed')
    need((await fetch(await sandbox.downloadUrl('/tmp/a'))).status === 200, 'signed address')
  },
  async watch(sandbox) {
    const seen = []
    await sandbox.files.makeDir('/tmp/watched')
    const handle = await sandbox.files.watchDir('/tmp/watched', (event) => { seen.push(event) })
    await sandbox.files.write('/tmp/watched/f', '1')
    while (!seen.some((each) => each.type === 'write')) await new Promise((resolve) => setTimeout(resolve, 10))
    need(seen.every((each) => each.name === 'f'), JSON.stringify(seen))
    await handle.stop()
  },
  async pty(sandbox) {
    let seen = ''
    const handle = await sandbox.pty.create({ cols: 81, rows: 25, onData: (data) => { seen += Buffer.from(data) } })
    await sandbox.pty.sendInput(handle.pid, Buffer.from('stty size; exit 3\n'))
    need((await refused(() => handle.wait())).exitCode === 3 && seen.includes('25 81'), seen)
  },
  async time(sandbox) {
    await sandbox.setTimeout(3_000_000)
    const info = await sandbox.getInfo()
    need(info.endAt - info.startedAt > 2_000_000 && info.metadata.a === 'b c', JSON.stringify(info))
    need((await Sandbox.list({ query: { metadata: { a: 'b c' } } }).nextItems()).length === 1, 'listed')
    need((await sandbox.getMetrics()).length === 1 && (await sandbox.isRunning()), 'runs')
  },
  async states(sandbox) {
    await sandbox.commands.run('sleep 4321', { background: true })
    await sandbox.pause()
    const again = await Sandbox.connect(sandbox.sandboxId)
    need((await again.commands.list()).some((each) => each.args.includes('sleep 4321')), 'resumed')
    const snapshot = await again.createSnapshot()
    const child = await Sandbox.create(snapshot.snapshotId)
    need((await child.files.read('/tmp/a')) === 'text', 'snapshot')
    need(await child.kill(), 'killed')
  },
  async kill(sandbox) {
    need(await sandbox.kill() && !(await sandbox.kill()), 'killed once')
    need(!(await sandbox.isRunning()), 'not running')
  },
}

const sandbox = await Sandbox.create({
  timeoutMs: 1_200_000, metadata: { a: 'b c' }, envs: { COLOUR: 'red' }, allowInternetAccess: false,
})
for (const [call, act] of Object.entries(calls)) {
  let outcome = 'passed'
  try {
    await act(sandbox)
  } catch (error) {
    outcome = String(error.stack)
  }
  console.log(JSON.stringify({ call, outcome }))
}
process.exit(0)
