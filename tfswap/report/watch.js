"use strict";
// The page of a watch: shows the rows that a search finds, and how much they held together.
const find = document.querySelector("input[type=search]"), rows = [...document.querySelectorAll(".owners tbody tr")];
const total = rows.reduce((sum, row) => sum + Number(row.dataset.bytes), 0);
for (const row of rows) row.text = row.lastElementChild.textContent.toLowerCase();
function filter() {
  const word = find.value.trim().toLowerCase();
  let sum = 0, count = 0;
  for (const row of rows) {
    row.hidden = Boolean(word) && !row.text.includes(word);
    if (!row.hidden) { sum += Number(row.dataset.bytes); count++; }
  }
  const share = total ? Math.round(100 * sum / total) : 0;
  document.querySelector(".found").textContent = word ? `${count} row${count === 1 ? "" : "s"}, ${(sum / 2 ** 20).toFixed(1)} MiB, ${share}%` : "";
}
if (find) searching(find, filter);
