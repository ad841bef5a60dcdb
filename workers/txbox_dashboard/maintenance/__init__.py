"""What is kept and forgotten, what audits have found, and what people have done."""
