// graphile-worker: its local queue and batched completion; the variant "record" records each message with its effect.
import { amount, begin, connections, count, deliveries, load, pg, schema, url, variant, version } from './feed.mjs'

const { run, makeWorkerUtils, Logger } = await load('graphile-worker')
const logger = new Logger(() => () => {})
const pool = new pg.Pool({ connectionString: url, max: connections })
const utils = await makeWorkerUtils({ connectionString: url, logger })
await utils.migrate()
for (let start = 0; start < deliveries.length; start += 1000) {
  await utils.addJobs(deliveries.slice(start, start + 1000).map((payload) => ({ identifier: 'apply', payload })))
}
const update = { name: 'update', text: `UPDATE ${schema}.account SET balance = balance + ${amount} WHERE account_id = $1` }
const record = {
  name: 'record',
  text: `INSERT INTO ${schema}.processed_message (subscriber_id, message_id) VALUES ('benchmark', $1) ON CONFLICT DO NOTHING`,
}

async function recorded({ id, account }) {
  const client = await pool.connect()
  await client.query('BEGIN')
  const { rowCount } = await client.query({ ...record, values: [id] })
  if (rowCount) await client.query({ ...update, values: [account] })
  await client.query('COMMIT')
  client.release()
}

const apply = variant === 'record' ? recorded : ({ account }) => pool.query({ ...update, values: [account] })
const preset = { worker: { concurrentJobs: connections, localQueue: { size: 200 }, completeJobBatchDelay: 0, failJobBatchDelay: 0, maxPoolSize: connections + 2 } }
await begin('graphile-worker', version('graphile-worker'), `concurrentJobs ${connections}, localQueue.size 200, completeJobBatchDelay 0`)
await run({ connectionString: url, preset, logger, noHandleSignals: true, taskList: { apply: async (payload) => { await apply(payload); count(1) } } })
