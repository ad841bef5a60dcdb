// River: jobs that each update an account; the variant "tx" completes the job in the transaction of its effect.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

const (
	record = "INSERT INTO txbox_benchmark.processed_message (subscriber_id, message_id) VALUES ('benchmark', $1) ON CONFLICT DO NOTHING"
	update = "UPDATE txbox_benchmark.account SET balance = balance + 3 WHERE account_id = $1"
)

type Apply struct {
	ID      string `json:"id"`
	Account int    `json:"account"`
}

func (Apply) Kind() string { return "apply" }

type worker struct {
	river.WorkerDefaults[Apply]
	pool  *pgxpool.Pool
	tx    bool
	done  atomic.Int64
	total int64
}

func (w *worker) Work(ctx context.Context, job *river.Job[Apply]) error {
	if err := w.apply(ctx, job); err != nil {
		return err
	}
	if w.done.Add(1) == w.total {
		fmt.Printf("{\"deliveries\": %d}\n", w.total)
	}
	return nil
}

func (w *worker) apply(ctx context.Context, job *river.Job[Apply]) error {
	if !w.tx {
		_, err := w.pool.Exec(ctx, update, job.Args.Account)
		return err
	}
	tx, err := w.pool.Begin(ctx)
	if err != nil {
		return err
	}
	defer tx.Rollback(ctx)
	first, err := tx.Exec(ctx, record, job.Args.ID)
	if err != nil {
		return err
	}
	if first.RowsAffected() == 1 {
		if _, err = tx.Exec(ctx, update, job.Args.Account); err != nil {
			return err
		}
	}
	if _, err = river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

func must[T any](value T, err error) T {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return value
}

func main() {
	ctx := context.Background()
	var given struct {
		URL, Variant string
		Connections  int
	}
	must(0, json.Unmarshal([]byte(os.Args[1]), &given))
	config := must(pgxpool.ParseConfig(given.URL))
	config.MaxConns = int32(given.Connections)
	pool := must(pgxpool.NewWithConfig(ctx, config))
	must(must(rivermigrate.New(riverpgxv5.New(pool), nil)).Migrate(ctx, rivermigrate.DirectionUp, nil))

	w := &worker{pool: pool, tx: given.Variant == "tx"}
	workers := river.NewWorkers()
	river.AddWorker(workers, w)
	client := must(river.NewClient(riverpgxv5.New(pool), &river.Config{
		Queues:  map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 2000}},
		Workers: workers,
		Logger:  slog.New(slog.DiscardHandler),
	}))
	rows := must(pool.Query(ctx, "SELECT message_id, account FROM txbox_benchmark.feed ORDER BY number"))
	var jobs []river.InsertManyParams
	for rows.Next() {
		var args Apply
		must(0, rows.Scan(&args.ID, &args.Account))
		jobs = append(jobs, river.InsertManyParams{Args: args})
	}
	w.total = int64(len(jobs))
	for start := 0; start < len(jobs); start += 1000 {
		must(client.InsertManyFast(ctx, jobs[start:min(start+1000, len(jobs))]))
	}
	fmt.Printf("{\"version\": \"river v0.51.2\", \"settings\": \"MaxWorkers 2000, a pool of %d\"}\n", given.Connections)
	must(bufio.NewReader(os.Stdin).ReadString('\n'))
	must(0, client.Start(ctx))
	select {}
}
