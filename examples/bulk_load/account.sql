INSERT INTO account (customer_id, cents)
SELECT customer_id, sum(cents) FROM fresh_event GROUP BY customer_id ORDER BY customer_id
ON CONFLICT (customer_id) DO UPDATE SET cents = account.cents + excluded.cents;
