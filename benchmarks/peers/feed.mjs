// What feed.py is for programs in Python: the deliveries, and the talk with the benchmark.
import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'
import readline from 'node:readline'

const given = JSON.parse(process.argv[2])
const packages = createRequire(`${given.env}/`)

export const { url, variant, connections } = given
export const load = async (name) => import(pathToFileURL(packages.resolve(name)))
export const { default: pg } = await load('pg')
export const schema = 'txbox_benchmark'
export const amount = 3

const client = new pg.Client(url)
await client.connect()
export const deliveries = (await client.query(`SELECT message_id AS id, account FROM ${schema}.feed ORDER BY number`)).rows
await client.end()

const say = (object) => console.log(JSON.stringify(object))

export async function begin(name, version, settings) {
  say({ version: `${name} ${version}`, settings })
  await new Promise((resolve) => readline.createInterface({ input: process.stdin }).once('line', resolve))
}

let done = 0
export function count(more) {
  done += more
  if (done === deliveries.length) say({ deliveries: done })
}

export const version = (name) => given.versions[name]
