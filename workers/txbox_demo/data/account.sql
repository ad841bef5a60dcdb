-- The effect of a purchase: it is added to its customer's account, and published for the mail.
-- Billing's workers apply it, and so does the final stage's bulk load, which publishes nothing.
INSERT INTO account (customer_id, purchases, cds, cents)
SELECT customer_id, count(*), sum(cds), sum(cents) FROM fresh_event GROUP BY customer_id ORDER BY customer_id
ON CONFLICT (customer_id) DO UPDATE SET
  purchases = account.purchases + excluded.purchases,
  cds = account.cds + excluded.cds,
  cents = account.cents + excluded.cents;

-- Each row is a message with a new id: done twice, it would lead to two mails, which the check finds.
SELECT customer_id AS key,
  jsonb_build_object('order_id', message_id, 'customer_id', customer_id, 'cents', cents) AS body
FROM fresh_event ORDER BY message_id
