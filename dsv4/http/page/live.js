// ---- live view: polled while the page is visible ----
let last = null; const rates = [];
const size = (bytes) => { let unit = 0; while (bytes >= 1024 && unit < 4) { bytes /= 1024; unit += 1; } return bytes.toFixed(unit ? 1 : 0) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][unit]; };
async function look() {
  try {
    const response = await fetch("/live", { headers: headers() });
    if (response.ok) showLive(await response.json());
  } catch { $("rate").textContent = "–"; }
}
async function refresh() {
  if (document.visibilityState === "visible") await look();
  setTimeout(refresh, 1000);
}
function showLive(now) {
  if (model !== now.model) { model = now.model; $("model").textContent = model; }
  if (last && now.seconds > last.seconds) {
    const rate = Math.max(0, now.output_tokens - last.output_tokens) / (now.seconds - last.seconds);
    $("rate").textContent = rate.toFixed(rate < 10 ? 1 : 0);
    rates.push(rate); if (rates.length > 60) rates.shift();
    drawRates();
  }
  last = now;
  $("running").textContent = `${now.running} of ${now.slots}`; $("waiting").textContent = now.waiting;
  $("batch").value = now.running / now.slots;
  $("drafts").hidden = now.step_tokens === null;
  if (now.step_tokens !== null) {
    $("step-tokens").textContent = now.step_tokens.toFixed(2);
    $("drafts").title = "Drafts that came true, by place: " + now.accepted.map((share) => Math.round(100 * share) + " %").join(", ");
  }
  $("blocks").textContent = `${now.blocks_used} of ${now.blocks}`;
  if ($("cache").childElementCount !== 2 * now.cache.length) {
    $("cache").replaceChildren(...now.cache.flatMap((kind) => {
      const row = make("div", "row"), meter = make("meter");
      row.append(make("span", "", kind.name), make("span")); meter.setAttribute("aria-label", kind.name);
      return [row, meter];
    }));
  }
  now.cache.forEach((kind, place) => {
    $("cache").children[2 * place].lastChild.textContent = `${size(kind.used_bytes)} of ${size(kind.total_bytes)}`;
    $("cache").children[2 * place + 1].value = kind.total_bytes ? kind.used_bytes / kind.total_bytes : 0;
  });
  drawExperts(now.experts);
}
function drawRates() {
  const canvas = $("spark"), pen = canvas.getContext("2d"), top = Math.max(...rates, 1);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.beginPath(); pen.lineWidth = 2; pen.strokeStyle = getComputedStyle($("send")).backgroundColor;
  rates.forEach((rate, place) => pen.lineTo((place + 60 - rates.length) * canvas.width / 59, canvas.height - 3 - rate / top * (canvas.height - 8)));
  pen.stroke();
}
// Of the digits, so about: the busiest expert of all layers has a 9.
function sayExpert(event) {
  const box = $("experts").getBoundingClientRect(), layers = last?.experts || [];
  const row = Math.floor((event.clientY - box.top) / box.height * layers.length), layer = layers[row] || "";
  const column = Math.floor((event.clientX - box.left) / box.width * layer.length);
  if (!layer[column]) return;
  const all = [...layer].reduce((sum, digit) => sum + Number(digit), 0);
  $("expert").textContent = `Layer ${row}, expert ${column}: about ${Math.round(all ? 100 * layer[column] / all : 0)} % of the layer's choices`;
}
function drawExperts(layers) {
  const canvas = $("experts"), pen = canvas.getContext("2d");
  canvas.width = layers[0].length; canvas.height = layers.length;
  pen.fillStyle = getComputedStyle($("send")).backgroundColor;
  layers.forEach((layer, row) => [...layer].forEach((digit, column) => { pen.globalAlpha = Number(digit) / 9; pen.fillRect(column, row, 1, 1); }));
}
