// pg-boss: transactional workers; records and effects of a batch are two statements in its transaction.
import { amount, begin, connections, count, deliveries, load, pg, schema, url, version } from './feed.mjs'

const { PgBoss } = await load('pg-boss')
const boss = new PgBoss({ connectionString: url, max: connections + 4 })
boss.on('error', (error) => console.error(error))
await boss.start()
await boss.createQueue('apply')
for (let start = 0; start < deliveries.length; start += 1000) {
  await boss.insert('apply', deliveries.slice(start, start + 1000).map((data) => ({ data })))
}
await begin('pg-boss', version('pg-boss'), `transactional, ${connections} workers, batchSize 100, burstWhenBatchFull`)
const options = { transactional: true, localConcurrency: connections, batchSize: 100, burstWhenBatchFull: true, pollingIntervalSeconds: 0.5 }
await boss.work('apply', options, async (jobs, tx) => {
  const account = new Map(jobs.map(({ data }) => [data.id, data.account]))
  const first = await tx.executeSql(
    `INSERT INTO ${schema}.processed_message (subscriber_id, message_id) SELECT 'benchmark', unnest($1::text[])
     ON CONFLICT DO NOTHING RETURNING message_id`, [[...account.keys()].sort()])
  const accounts = first.rows.map((row) => account.get(row.message_id)).sort((a, b) => a - b)
  await tx.executeSql(
    `WITH change AS MATERIALIZED (SELECT account_id, count(*) * ${amount} AS amount FROM unnest($1::int[]) AS account_id GROUP BY 1),
     locked AS MATERIALIZED (SELECT account_id, amount FROM ${schema}.account JOIN change USING (account_id) ORDER BY 1 FOR NO KEY UPDATE OF account)
     UPDATE ${schema}.account SET balance = balance + locked.amount FROM locked WHERE account.account_id = locked.account_id`, [accounts])
})

// pg-boss commits after the handler: the records say when all are done.
const watcher = new pg.Client(url)
await watcher.connect()
const total = new Set(deliveries.map(({ id }) => id)).size
const recorded = async () => (await watcher.query(`SELECT count(*)::int AS n FROM ${schema}.processed_message`)).rows[0].n
while ((await recorded()) < total) await new Promise((resolve) => setTimeout(resolve, 10))
count(deliveries.length)
